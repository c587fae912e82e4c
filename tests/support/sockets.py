"""The sockets of processes that listen for others, as the kernel lists them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def list_listening(processes: Iterable[int | str]) -> set[str]:
    """The addresses on which processes listen, in the kernel's notation."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:  # closed meanwhile
                continue
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    listening = (fields for fields in lines if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes)
    return {fields[1].split(":")[0] for fields in listening}
