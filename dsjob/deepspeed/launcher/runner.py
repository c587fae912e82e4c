"""`deepspeed.launcher.runner`: the name that `accelerate launch` imports before it starts ranks."""

from __future__ import annotations

import os

from dsjob.deepspeed.absent import explain_names as _explain_names

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")  # written for several machines with pdsh

__getattr__ = _explain_names(__name__)
