"""Restores the state of the process in which a Python program calls dsjob."""

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
    """Restores process-wide state after the block, even if it fails: the environment, the current folder, `sys.path`,
    warning filters, and the state of Python's random generator.

    `torch`: the block imports torch. Then torch's state is restored as well: the default dtype, the number of threads,
    and the random generators of NumPy and torch. A process group that the block leaves behind is abandoned.
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
        abandon_world()  # a failed run leaves its process group behind
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        restore_rng(drawn, device)


def require_no_group() -> None:
    """Raises UsageError if the program has a process group: a run in this process creates its own."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise UsageError(
            "this process already has a process group, and a run creates its own",
            hint="call torch.distributed.destroy_process_group() first, or run in separate processes: launch.nproc=2",
        )
