"""Which GPUs of this machine ranks use: `include` and `exclude`, in the words of DeepSpeed's launcher.

Both name GPUs as nvidia-smi numbers them, so CUDA_VISIBLE_DEVICES has no effect beside them.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Sequence

from dsjob.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_SLOTS = re.compile(r"(?P<host>[^:@,]+)(?::(?P<slots>\d+(?:,\d+)*))?")


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
    names = [name.strip() for name in listed.split(",")]
    return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))


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
    named = _read_numbers(given, label) if given is not None else []
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


def _read_numbers(given: str | Sequence[int], label: str) -> list[int] | None:
    """The numbers of the GPUs, in order; None for all GPUs of this machine."""
    if not isinstance(given, str):
        return sorted(set(given))
    if "@" in given:
        raise _refuse_machines(f"{label} {given} names several machines")
    found = _SLOTS.fullmatch(given)
    if not found:
        raise UsageError(f"cannot read {label} {given!r}", hint=f"write {label} localhost:0,2")
    if found["host"] not in ("localhost", "127.0.0.1", socket.gethostname()):
        raise _refuse_machines(f"{label} {given} names the machine {found['host']}, and this is {socket.gethostname()}")
    return sorted({int(slot) for slot in found["slots"].split(",")}) if found["slots"] else None


def _refuse_machines(message: str) -> UsageError:
    return UsageError(message, hint="dsjob starts ranks on this machine only; start those of several with torchrun")
