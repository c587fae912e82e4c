"""Writes DeepSpeed's objects with `torch.save`, without importing DeepSpeed: stand-in classes get its class names."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

from dsjob.checkpoint.other.torch_files import STANDS_FOR
from dsjob.errors import StorageError

_NAMES = {stub: name for name, stub in STANDS_FOR.items()}


class _Pickler(pickle._Pickler):  # the Python implementation; the one in C has no save_global to override
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj not in _NAMES:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, own = _NAMES[obj].rpartition(".")
        self.write(b"c" + module.encode() + b"\n" + own.encode() + b"\n")  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def save_named(value: Any, path: str) -> None:
    """Writes one file. Raises StorageError."""
    try:
        torch.save(value, path, pickle_module=SimpleNamespace(Pickler=_Pickler, __name__="pickle"))
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        raise StorageError(f"cannot write {path}: {str(error).splitlines()[0]}") from error
