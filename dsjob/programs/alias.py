"""Makes `import deepspeed` give `dsjob.deepspeed`, in this process and in the processes that it starts.

The folder `STAND_IN` holds a package and package metadata named deepspeed. First on the import path, it hides an
installed DeepSpeed, and PYTHONPATH hands it to child processes. So availability checks succeed (`find_spec`,
`importlib.metadata.version`), and nothing of dsjob or torch is imported before the program imports deepspeed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

STAND_IN = str(Path(__file__).parent / "stand_in")
_ALIAS, _TARGET = "deepspeed", "dsjob.deepspeed"


class _Aliases(MetaPathFinder):
    """Finds a module of deepspeed: the one of dsjob.deepspeed itself, so that its classes exist once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_ALIAS}."):
            return None
        # None for a module that dsjob does not have, which the finder of `dsjob.deepspeed.absent` then explains.
        found = find_spec(_TARGET + fullname.removeprefix(_ALIAS))
        return found and ModuleSpec(
            fullname, _AliasLoader(found.name), is_package=found.submodule_search_locations is not None
        )


class _AliasLoader(Loader):
    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._target)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # importlib has replaced it by the spec of the alias


def alias_imports() -> None:
    """Puts `dsjob.deepspeed` in the place of the module `deepspeed`. Called by the stand-in when it is imported."""
    sys.modules[_ALIAS] = import_module(_TARGET)
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())
    import_module("dsjob.programs.origins").begin()


def stand_in(environment: MutableMapping[str, str], path: list[str] | None = None) -> None:
    """Puts the stand-in first on PYTHONPATH in `environment`, and first on `path`, such as `sys.path`."""
    leave_out(environment)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_IN, environment["PYTHONPATH"]]))
    if path is not None:
        path[:] = [STAND_IN, *(folder for folder in path if folder != STAND_IN)]


def leave_out(environment: MutableMapping[str, str]) -> None:
    """Removes the stand-in from PYTHONPATH in `environment`."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder and folder != STAND_IN)
