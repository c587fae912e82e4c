"""Makes the functions of an op callable, after building it where that is necessary."""

from __future__ import annotations

import functools

import torch

from dsjob.errors import BuildError
from dsjob.ops.registry import OPS


@functools.cache
def load(name: str, *, build: bool = True) -> str:
    """Loads an op, once per process, and builds it before if necessary. Returns why it cannot be used, or nothing.

    build=False: use it only if it has been built ahead.
    """
    from dsjob.ops import build as building  # late, since it imports setuptools and torch's build tools

    op = OPS[name]
    try:
        library = building.build(op) if build else building.find_built(op)
        if library is None:
            return f"{name} has not been built: run `dsjob ops build {name}`"
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (BuildError, OSError) as error:
        return str(error)
    return ""
