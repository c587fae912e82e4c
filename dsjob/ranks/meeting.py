"""The rendezvous of ranks that torchrun, srun or a program has started: a store, separate for each start.

torchrun restarts ranks without a new store, and each of its agents counts restarts on its own. So neither keys nor
counts distinguish one start from the next. Instead, rank 0 chooses a name for each start, which prefixes all its keys.

The run's folder is stored outside this prefix, so that a later start resumes in it.
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
LONGEST_WAY = 300.0  # seconds between the first and the last rank to arrive: interpreters start at different speeds
_KEYS, _QUESTIONS = "dsjob", "questions"
_lasting: Store | None = None


def open_store(rank: int, world_size: int, timeout: float) -> Store:
    """The store of this start. timeout: seconds that a collective may take.

    Raises LaunchError if not all ranks arrive within that time, or within five minutes if that is longer.
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
    # From here on, the store waits only as long as a collective may take.
    beneath.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(f"{_KEYS}/{name}", found)


def recall(key: str) -> str | None:
    """The value that `keep` stored for `key`, also in an earlier start of these ranks; None if there is none."""
    if _lasting is None or not _lasting.check([key]):
        return None
    return _lasting.get(key).decode()


def keep(key: str, value: str) -> None:
    """Stores a value for later starts of these ranks, if torchrun's store outlives them."""
    if _lasting is not None:
        _lasting.set(key, value)


def _name_start(store: Store, world_size: int, timeout: float) -> str:
    """Chooses a name for this start, and answers every question with it until all ranks have taken it.

    (Some questions may be left over from an earlier start.) All questions are in one key, and all ranks that took the
    name in another, so that polling costs the same for a thousand ranks as for two.
    """
    name, answered, pause, end = uuid.uuid4().hex, set[str](), 0.005, time.monotonic() + timeout
    taken, ranks = f"taken/{name}", set(map(str, range(1, world_size)))
    for key in (_QUESTIONS, taken):
        _append(store, key, "")  # create the key, because `get` would wait for a missing one
    while missing := ranks.difference(store.get(taken).decode().split()):
        questions = [each for each in store.get(_QUESTIONS).decode().split() if each not in answered]
        if questions:
            # One message to the store for all new questions.
            store.multi_set([f"name/{each}" for each in questions], [name] * len(questions))  # type: ignore[attr-defined]
            answered.update(questions)
        if time.monotonic() > end:
            first = ", ".join(sorted(missing, key=int)[:8]) + (", ..." if len(missing) > 8 else "")
            raise LaunchError(
                f"{len(missing)} of {world_size} ranks did not join within {timeout:g} s: {first}",
                hint="check their output: they may have failed, or cannot reach MASTER_ADDR (firewall, other network)",
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
            f"rank {rank}: rank 0 did not join within {timeout:g} s", hint="check the output of rank 0"
        ) from error
    # Rank 0 leaves its loop once all ranks have written here.
    _append(store, f"taken/{name}", str(rank))
    return name


def _append(store: Store, key: str, word: str) -> None:
    store.append(key, f"{word} ")  # type: ignore[attr-defined]
