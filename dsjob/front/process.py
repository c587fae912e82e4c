"""The process that a Python program calls dsjob in: left as it was found."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from dsjob.errors import UsageError


@contextmanager
def keeping_process(*, torch: bool) -> Iterator[None]:
    """Gives the program back what the block changes, also where it fails: the environment, the current folder,
    `sys.path`, the filters of warnings, and the state of Python's random generator.

    `torch`: the block imports torch, so that also what torch keeps for the whole process comes back: the default dtype,
    the number of threads, the generators of NumPy and torch, and that there is no process group.
    """
    environment, folder, path = dict(os.environ), os.getcwd(), list(sys.path)
    drawn, shows_crashes = random.getstate(), faulthandler.is_enabled()
    try:
        with warnings.catch_warnings():
            if torch:
                with _keeping_torch():
                    yield
            else:
                yield
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        if not os.path.isdir(".") or os.getcwd() != folder:
            os.chdir(folder)
        sys.path[:] = path
        random.setstate(drawn)
        if not shows_crashes:
            faulthandler.disable()


@contextmanager
def _keeping_torch() -> Iterator[None]:
    import torch

    from dsjob.checkpoint.live.rng import capture_rng, restore_rng
    from dsjob.ranks.mesh import abandon_world

    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]
    dtype, threads, drawn = torch.get_default_dtype(), torch.get_num_threads(), capture_rng(device)
    try:
        yield
    finally:
        abandon_world()  # of a run that has failed
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        restore_rng(drawn, device)


def require_no_group() -> None:
    """Raises UsageError where the program has a process group: a run on this process makes its own."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise UsageError(
            "this process has a process group already, and a run makes its own",
            hint="call torch.distributed.destroy_process_group() before, or run on ranks of its own: launch.nproc=2",
        )
