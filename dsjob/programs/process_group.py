"""accelerate must see all ranks. On a CPU, it only does so if the program names a backend, and says nothing otherwise.

Without a backend, each rank would train by itself, on all data. With `cpu=True`, the DeepSpeedPlugin would be ignored.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.utils import DistributedType

from dsjob.errors import UsageError
from dsjob.programs.alias import STAND_IN
from dsjob.programs.origins import find_line

_HANDLER = 'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]'


def install() -> None:
    """Makes each Accelerator check its ranks. Called when accelerate.accelerator has been imported."""
    if STAND_IN not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return  # --engine deepspeed
    make = Accelerator.__init__

    def make_and_check(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _check(self, kwargs)

    Accelerator.__init__ = make_and_check


def _check(made: Any, given: dict[str, Any]) -> None:
    """Raises UsageError if accelerate does not use DeepSpeed on all ranks. given: the arguments of `made`."""
    ranks, place = int(os.environ.get("WORLD_SIZE", "1")), "{}:{}".format(*find_line())
    if made.distributed_type is not DistributedType.DEEPSPEED:
        if given.get("cpu") and (given.get("deepspeed_plugin") or given.get("deepspeed_plugins")):
            raise UsageError(
                f"{place}: with cpu=True, accelerate ignores the DeepSpeedPlugin",
                hint=f"leave out cpu=True; without GPUs, pass {_HANDLER} to Accelerator",
            )
    elif made.num_processes < ranks:
        raise UsageError(
            f"{place}: accelerate takes each of the {ranks} ranks for a program of its own: it has no GPU or backend",
            hint="without GPUs, set use_cpu=True in TrainingArguments (--use_cpu)"
            if _is_of_trainer(made)
            else f"pass {_HANDLER} to Accelerator",
        )


def _is_of_trainer(made: Any) -> bool:
    """Whether TrainingArguments has the config; transformers then ignores ddp_backend, and only use_cpu helps."""
    transformers: Any = sys.modules.get("transformers.integrations.deepspeed")
    config = made.state.deepspeed_plugin.hf_ds_config
    return transformers is not None and isinstance(config, transformers.HfTrainerDeepSpeedConfig)
