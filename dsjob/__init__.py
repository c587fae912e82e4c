"""dsjob: a declarative job runner for PyTorch training.

`import dsjob` does not import torch: each name is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsjob import checkpointing as checkpointing
    from dsjob import errors as errors
    from dsjob.callbacks.callback import Callback as Callback
    from dsjob.callbacks.callback import RunView as RunView
    from dsjob.config import BatchConfig as BatchConfig
    from dsjob.engine.build import add_config_arguments as add_config_arguments
    from dsjob.engine.build import initialize as initialize
    from dsjob.engine.engine import Engine as Engine
    from dsjob.errors import Problem as Problem
    from dsjob.front.generate import Generation as Generation
    from dsjob.front.generate import generate as generate
    from dsjob.front.look import plan as plan
    from dsjob.front.look import resolve as resolve
    from dsjob.front.look import validate as validate
    from dsjob.front.run import Result as Result
    from dsjob.front.run import run as run
    from dsjob.front.runs import RunInfo as RunInfo
    from dsjob.front.runs import list_runs as list_runs
    from dsjob.front.tasks import Evaluation as Evaluation
    from dsjob.front.tasks import Predictions as Predictions
    from dsjob.front.tasks import evaluate as evaluate
    from dsjob.front.tasks import predict as predict
    from dsjob.front.weights import convert as convert
    from dsjob.front.weights import load_model as load_model
    from dsjob.monitors.monitor import Monitor as Monitor
    from dsjob.monitors.monitor import Series as Series
    from dsjob.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from dsjob.parallel.pipeline.layers import Layers as Layers
    from dsjob.ranks.mpu import ModelParallelUnit as ModelParallelUnit
    from dsjob.ranks.rendezvous import init_distributed as init_distributed
    from dsjob.training.trainer import Trainer as Trainer

    __version__: str

_MODULES = ("checkpointing", "errors")
_HOMES = {
    "BatchConfig": "dsjob.config",
    "Callback": "dsjob.callbacks.callback",
    "Engine": "dsjob.engine.engine",
    "Evaluation": "dsjob.front.tasks",
    "Generation": "dsjob.front.generate",
    "Layers": "dsjob.parallel.pipeline.layers",
    "ModelParallelUnit": "dsjob.ranks.mpu",
    "Monitor": "dsjob.monitors.monitor",
    "Predictions": "dsjob.front.tasks",
    "Problem": "dsjob.errors",
    "Result": "dsjob.front.run",
    "RunInfo": "dsjob.front.runs",
    "RunView": "dsjob.callbacks.callback",
    "Series": "dsjob.monitors.monitor",
    "Trainer": "dsjob.training.trainer",
    "add_config_arguments": "dsjob.engine.build",
    "convert": "dsjob.front.weights",
    "evaluate": "dsjob.front.tasks",
    "generate": "dsjob.front.generate",
    "init_distributed": "dsjob.ranks.rendezvous",
    "initialize": "dsjob.engine.build",
    "linear_cross_entropy": "dsjob.ops.linear_cross_entropy",
    "list_runs": "dsjob.front.runs",
    "load_model": "dsjob.front.weights",
    "plan": "dsjob.front.look",
    "predict": "dsjob.front.tasks",
    "resolve": "dsjob.front.look",
    "run": "dsjob.front.run",
    "validate": "dsjob.front.look",
}
__all__ = [
    "BatchConfig",
    "Callback",
    "Engine",
    "Evaluation",
    "Generation",
    "Layers",
    "ModelParallelUnit",
    "Monitor",
    "Predictions",
    "Problem",
    "Result",
    "RunInfo",
    "RunView",
    "Series",
    "Trainer",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "convert",
    "errors",
    "evaluate",
    "generate",
    "init_distributed",
    "initialize",
    "linear_cross_entropy",
    "list_runs",
    "load_model",
    "plan",
    "predict",
    "resolve",
    "run",
    "validate",
]


def _find_clone() -> Path | None:
    """The source tree that this package lies in; None where it is installed.

    The project file beside it must be dsjob's: in site-packages another project's may lie, packed there by mistake.
    """
    root = Path(__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    return root if project.is_file() and '\nname = "dsjob"\n' in project.read_text(encoding="utf-8") else None


CLONE = _find_clone()


class _FoldersBeside:
    """Finds the packages `_names` beside this package, where a clone has them. (A wheel has them inside.) So a clone
    works without being installed.

    An entry in `__path__` would be shorter, but would make the whole folder a part of dsjob: tests, documentation, and
    dsjob itself.
    """

    _names = frozenset({"dsjob.conf", "dsjob.schemas", "dsjob.recipes", "dsjob.ops"})

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(CLONE)]) if name in cls._names else None


if CLONE:
    # First, since the finder of an editable install would answer with the folders of another clone.
    sys.meta_path.insert(0, _FoldersBeside)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        if CLONE:  # what is installed may be another version
            import tomllib

            return tomllib.loads((CLONE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
        from importlib.metadata import version

        return version("dsjob")
    if name in _MODULES:
        return import_module(f"dsjob.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dsjob' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
