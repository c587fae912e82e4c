"""File systems of a few hundred kilobytes that fill up, and that can be made read-only, on one rank or several.

They are mounted in a process of their own, as root or in a user namespace: where neither is allowed there are none.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from forks import begin_anew
from storage_points import Fork

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 1 << 14, 1 << 18


def mount_own(path: str, size: int) -> bool:
    """Mounts a file system of so many bytes that this process and its children alone see; whether it is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNS):
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    return libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, f"size={size}".encode()) == 0


def remount(path: str, *, read_only: bool = False, size: int = 0) -> None:
    """Changes a file system of `mount_own`."""
    options = f"size={size}".encode() if size else None
    flags = MS_REMOUNT | (MS_RDONLY if read_only else 0)
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", path.encode(), b"tmpfs", flags, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def run_ranks_here(function: Callable[..., Any], world_size: int, store: str, *arguments: Any) -> list[Any]:
    """As ranks.run_ranks, in forks of this very process, so that they see its mounts."""

    def run(rank: int) -> Any:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        begin_anew({**os.environ, **place, "DSJOB_STORE": store, "GLOO_SOCKET_IFNAME": "lo"})
        torch.set_num_threads(1)
        from dsjob.ranks.mesh import join_world, leave_world

        found = function(join_world(device="cpu", timeout=120), *arguments)
        leave_world()
        return found

    if world_size == 1:
        return [Fork(lambda: function(None, *arguments)).get()]
    forks = [Fork(lambda rank=rank: run(rank)) for rank in range(world_size)]  # type: ignore[misc]
    return [fork.get() for fork in forks]
