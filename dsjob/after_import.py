"""Calls something right after a module was imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def call_after_import(name: str, call: Callable[[], None]) -> None:
    """Calls `call` once, right after the module `name` was imported; at once if it is imported already."""
    if name in sys.modules:
        call()
    elif not any(isinstance(each, _Finder) and each.waits_for(name, call) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call, self._looks = name, call, False

    def waits_for(self, name: str, call: Callable[[], None]) -> bool:
        """Whether it will do just this."""
        return (self._name, self._call) == (name, call)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._looks:
            return None
        self._looks = True
        try:
            found = find_spec(fullname)
        finally:
            self._looks = False
        loader = found.loader if found is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)  # not before: programs also look for a module without importing it
                self._call()

            loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return found
