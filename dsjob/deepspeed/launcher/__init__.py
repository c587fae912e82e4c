"""`deepspeed.launcher`: what other launchers ask of it. Ranks are started by `dsjob exec`, torchrun or srun."""
