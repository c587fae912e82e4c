"""`deepspeed.launcher.runner`: the name that `accelerate launch` imports before it starts ranks."""

from __future__ import annotations

import os

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")  # written for several machines with pdsh
