"""Reads `include` and `exclude`, which name GPUs of this machine in the words of DeepSpeed's launcher."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from dsjob.errors import UsageError

_SLOTS = re.compile(r"(?P<host>[^:@,]+)(?::(?P<slots>\d{1,6}(?:,\d{1,6})*))?")


def read_gpus(given: str | Sequence[int], label: str) -> list[int] | None:
    """The numbers of the GPUs that `localhost:0,2` or a list names, in order; None for all GPUs of this machine.

    label: how messages call what was given. Raises UsageError.
    """
    if not isinstance(given, str):
        return sorted(set(given))
    if "@" in given:
        raise _refuse_machines(f"{label} {given} names several machines")
    found = _SLOTS.fullmatch(given)
    if not found:
        raise UsageError(f"cannot read {label} {given!r}", hint="write for example localhost:0,2")
    if found["host"] not in ("localhost", "127.0.0.1", socket.gethostname()):
        raise _refuse_machines(f"{label} {given} names another machine, {found['host']}")
    return sorted({int(slot) for slot in found["slots"].split(",")}) if found["slots"] else None


def _refuse_machines(message: str) -> UsageError:
    return UsageError(message, hint="dsjob starts ranks on this machine only; start those of several with torchrun")
