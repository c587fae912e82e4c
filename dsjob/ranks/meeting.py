"""Where the ranks that torchrun, srun or a program has started meet: a store, and what in it outlives restarts.

torchrun starts ranks anew without a new store, and its agents count restarts each for itself. So neither keys nor
counts tell one start from the one before it: rank 0 names each start, and the store of that start has the name as
prefix of its keys.

A run's folder is kept outside of that prefix, so that a later start resumes in it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store

from dsjob.errors import LaunchError

STORE_VARIABLE = "DSJOB_STORE"
LONGEST_WAY = (
    300.0  # seconds from the first rank's coming to the last one's: interpreters may start at different speeds
)
_KEYS, _QUESTIONS = "dsjob", "questions"
_lasting: Store | None = None


def open_store(rank: int, world_size: int, timeout: float) -> Store:
    """The store of this start of the ranks; `timeout`: seconds that a collective may take.

    Raises LaunchError where ranks have not come within that time, or five minutes if these are longer.
    """
    global _lasting
    seconds = max(timeout, LONGEST_WAY)
    found: Store
    if STORE_VARIABLE in os.environ:
        found = FileStore(os.environ[STORE_VARIABLE], world_size)
        beneath = PrefixStore(_KEYS, found)
    else:
        found, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=seconds)))
        beneath = _lasting = PrefixStore(_KEYS, found)
    beneath.set_timeout(timedelta(seconds=seconds))
    name = _name_start(beneath, world_size, seconds) if rank == 0 else _ask_for_name(beneath, rank, seconds)
    beneath.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(f"{_KEYS}/{name}", found)


def recall(key: str) -> str | None:
    """What `keep` was given for `key`, by an earlier start of these ranks too; None where there is nothing."""
    if _lasting is None or not _lasting.check([key]):
        return None
    return _lasting.get(key).decode()


def keep(key: str, value: str) -> None:
    """Keeps a value for later starts of these ranks, where torchrun's store outlives them."""
    if _lasting is not None:
        _lasting.set(key, value)


def _name_start(store: Store, world_size: int, timeout: float) -> str:
    """Gives each question the same new name, until all ranks have taken it: a question may be from an earlier start.

    Questions and takers are collected in one key each, so that a look costs as much for a thousand ranks as for two.
    """
    name, answered, pause, end = uuid.uuid4().hex, set[str](), 0.005, time.monotonic() + timeout
    taken, ranks = f"taken/{name}", set(map(str, range(1, world_size)))
    for key in (_QUESTIONS, taken):
        _append(store, key, "")  # `get` waits for a key that is not there
    while missing := ranks.difference(store.get(taken).decode().split()):
        questions = [each for each in store.get(_QUESTIONS).decode().split() if each not in answered]
        if questions:
            store.multi_set([f"name/{each}" for each in questions], [name] * len(questions))  # type: ignore[attr-defined]
            answered.update(questions)
        if time.monotonic() > end:
            first = ", ".join(sorted(missing, key=int)[:8]) + (", ..." if len(missing) > 8 else "")
            raise LaunchError(
                f"{len(missing)} of {world_size} ranks did not join within {timeout:g} s: {first}",
                hint="look at their output: they may have failed, or not reach MASTER_ADDR (firewall, another network)",
            )
        time.sleep(pause)
        pause = min(0.2, 1.5 * pause)
    return name


def _ask_for_name(store: Store, rank: int, timeout: float) -> str:
    question = uuid.uuid4().hex
    _append(store, _QUESTIONS, question)
    try:
        name = store.get(f"name/{question}").decode()
    except dist.DistStoreError as error:
        raise LaunchError(
            f"rank {rank}: rank 0 did not join within {timeout:g} s", hint="look at the output of rank 0"
        ) from error
    _append(store, f"taken/{name}", str(rank))
    return name


def _append(store: Store, key: str, word: str) -> None:
    store.append(key, f"{word} ")  # type: ignore[attr-defined]
