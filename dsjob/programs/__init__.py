"""Existing DeepSpeed programs, run unmodified on dsjob's engine: `dsjob exec`."""
