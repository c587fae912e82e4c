"""dsjob: a declarative job runner for PyTorch training.

The names below are imported when they are used, so that `import dsjob` and the commands that only look at documents
stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsjob import checkpointing as checkpointing
    from dsjob import errors as errors
    from dsjob.contract.batch import BatchConfig as BatchConfig
    from dsjob.engine.build import add_config_arguments as add_config_arguments
    from dsjob.engine.build import initialize as initialize
    from dsjob.engine.engine import Engine as Engine
    from dsjob.errors import Problem as Problem
    from dsjob.ranks.mpu import ModelParallelUnit as ModelParallelUnit
    from dsjob.ranks.rendezvous import init_distributed as init_distributed
    from dsjob.training.callbacks import Callback as Callback
    from dsjob.training.callbacks import RunView as RunView

    __version__: str

_MODULES = ("checkpointing", "errors")
_HOMES = {
    "BatchConfig": "dsjob.contract.batch",
    "Callback": "dsjob.training.callbacks",
    "Engine": "dsjob.engine.engine",
    "ModelParallelUnit": "dsjob.ranks.mpu",
    "Problem": "dsjob.errors",
    "RunView": "dsjob.training.callbacks",
    "add_config_arguments": "dsjob.engine.build",
    "init_distributed": "dsjob.ranks.rendezvous",
    "initialize": "dsjob.engine.build",
}
__all__ = [
    "BatchConfig",
    "Callback",
    "Engine",
    "ModelParallelUnit",
    "Problem",
    "RunView",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "errors",
    "init_distributed",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dsjob")
    if name in _MODULES:
        return import_module(f"dsjob.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dsjob' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
