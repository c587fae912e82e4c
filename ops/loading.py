"""Makes the functions of an op callable, after building it where that is necessary."""

from __future__ import annotations

import functools

import torch

from dsjob.errors import BuildError
from dsjob.ops.registry import OPS


@functools.cache
def load(name: str) -> str:
    """Builds and loads an op, once per process. Returns why it cannot be used, or nothing."""
    from dsjob.ops.build import build  # late, since it imports setuptools and torch's build tools

    try:
        torch.ops.load_library(str(build(OPS[name])))  # type: ignore[no-untyped-call]
    except (BuildError, OSError) as error:
        return str(error)
    return ""
