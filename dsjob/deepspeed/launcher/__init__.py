"""`deepspeed.launcher`: what other launchers ask of it. Ranks are started by `dsjob exec`, torchrun or srun."""

from dsjob.deepspeed.absent import explain_names as _explain_names

__getattr__ = _explain_names(__name__)
