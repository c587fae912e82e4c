"""Which GPUs of this machine ranks use: `include` and `exclude`, in the words of DeepSpeed's launcher.

Both name GPUs as nvidia-smi numbers them, so CUDA_VISIBLE_DEVICES has no effect beside them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from dsjob.contract.gpus import read_gpus
from dsjob.errors import UsageError

VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def count_gpus() -> int:
    """The number of GPUs of this machine, without torch, whose import takes seconds."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    library.nvmlShutdown()
    return count.value


def count_visible() -> int:
    """The number of GPUs that CUDA_VISIBLE_DEVICES leaves; all of this machine if it is not set."""
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return count_gpus()
    # CUDA ignores everything from the first empty or negative entry on.
    names = [name.strip() for name in listed.split(",")]
    return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))


def make_visible(gpus: Sequence[int]) -> dict[str, str]:
    """The environment variables that let a process see these GPUs, numbered as nvidia-smi does."""
    order = os.environ.get(_ORDER, "PCI_BUS_ID")  # by default, CUDA begins with the fastest GPU
    return {VISIBLE: ",".join(map(str, gpus)), _ORDER: order}


def choose_gpus(
    include: str | Sequence[int] | None, exclude: str | Sequence[int] | None, count: int, name: str = "{}"
) -> list[int]:
    """The GPUs, of `count`, that `include` names or `exclude` leaves: `localhost:0,2`, or a list of numbers.

    name: how messages call `include` and `exclude`. Raises UsageError.
    """
    key, given = ("include", include) if include is not None else ("exclude", exclude)
    label = name.format(key)
    if include is not None and exclude is not None:
        raise UsageError(f"{label} and {name.format('exclude')} exclude each other", hint="keep one of them")
    named = read_gpus(given, label) if given is not None else []
    if not count:
        raise UsageError(f"{label} names GPUs, but this machine has none", hint=f"leave {label} out")
    if missing := [number for number in named or [] if number >= count]:
        raise UsageError(
            f"{label} names GPU {missing[0]}, but this machine has GPUs 0 to {count - 1}" if count > 1
            else f"{label} names GPU {missing[0]}, but this machine has only GPU 0"
        )  # fmt: skip
    everything = list(range(count))
    if include is not None:
        return everything if named is None else named
    left = [] if named is None else [number for number in everything if number not in named]
    if not left:
        raise UsageError(f"{label} leaves no GPU of {count}")
    return left
