"""Prints a message that ends all ranks once, under launchers that show the output of each rank (torchrun, srun)."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from dsjob.ranks import patience
from dsjob.ranks.loopback import create_server
from dsjob.torch_private import get_store

_TO_CONNECT = 5  # seconds
_PAUSE = 0.1


def is_told(message: str) -> bool:
    """Whether another rank prints `message`. If not, the caller does, and then calls `tell_others`.

    Under torchrun, the first rank that asks prints it, because torchrun ends the others as soon as one has ended.
    Elsewhere rank 0 prints it; another rank waits a few seconds to learn whether rank 0 has the same message.
    """
    if _has_agent():
        return _ask_agent(message)
    rank, size = _find_place()
    if rank == 0 or size < 2:
        return False
    end = time.monotonic() + patience.TO_SHARE
    with suppress(OSError, RuntimeError):  # rank 0 has ended, or never listened
        return _ask_store(message, end) if dist.is_initialized() else _ask_rank_0(message, end)
    return False


def tell_others(message: str) -> None:
    """Rank 0, which has printed `message`, stays a few seconds for other ranks that ask `is_told`."""
    rank, size = _find_place()
    if _has_agent() or rank != 0 or size < 2:
        return
    end = time.monotonic() + patience.TO_SHARE
    with suppress(OSError, RuntimeError, KeyboardInterrupt):
        if dist.is_initialized():
            store, key = get_store(), _name(message)
            store.set(key, "")
            while store.add(f"{key}/heard", 0) < size - 1 and time.monotonic() < end:
                time.sleep(_PAUSE)
            return
        with create_server(*_find_address()) as server:
            for _ in range(size - 1):
                server.settimeout(max(end - time.monotonic(), _PAUSE))
                link = server.accept()[0]
                with link:
                    link.sendall(_name(message).encode())


def _has_agent() -> bool:
    """Whether torchrun has started this rank: its agent has a store, which all ranks can reach."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _find_place() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _find_address() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))


def _name(message: str) -> str:
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"dsjob/told/{start}/{hashlib.sha256(message.encode()).hexdigest()}"


def _ask_agent(message: str) -> bool:
    timeout = timedelta(seconds=_TO_CONNECT)
    try:
        store = dist.TCPStore(*_find_address(), is_master=False, timeout=timeout, wait_for_workers=False)
        return store.add(_name(message), 1) > 1
    except dist.DistError:
        return False


def _ask_store(message: str, end: float) -> bool:
    """Asks rank 0 by the store of the process group."""
    store, key = get_store(), _name(message)
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    store.add(f"{key}/heard", 1)  # not before: rank 0, which has the store, ends when all have heard
    return True


def _ask_rank_0(message: str, end: float) -> bool:
    """Asks rank 0 before there is a process group. A store that cannot connect would print a page of its own."""
    while time.monotonic() < end:
        with suppress(ConnectionError), socket.create_connection(_find_address(), timeout=_TO_CONNECT) as link:
            expected = _name(message).encode()
            return link.recv(len(expected), socket.MSG_WAITALL) == expected
        time.sleep(_PAUSE)
    return False
