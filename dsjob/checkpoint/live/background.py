"""Saves that go on while training does: copies of what is to be saved, and a thread of each rank that writes its own.

No collective is used here, since the ranks' training uses them meanwhile: rank 0's thread waits for the completion
records of the others, and commits.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsjob import storage
from dsjob.checkpoint.live.prepared import PreparedSave
from dsjob.checkpoint.live.shards import Part, read_record, write_record, write_shard
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError, FencedError
from dsjob.ranks import patience
from dsjob.ranks.agreement import as_told

# On rank 0: makes a checkpoint of all ranks' records; its bytes, and notes.
Commit = Callable[[Sequence[dict[str, Any]]], tuple[int, tuple[str, ...]]]


class ElsewhereError(CheckpointError):
    """Another rank could not write its part; it has the error itself."""


class Staging:
    """Host memory for copies of a rank's parts, used again by each save; pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """The parts as they are now, whatever becomes of the tensors."""
        buffers, devices = {}, set()
        for part in parts:
            key, tensor = (part.name, part.offsets), part.tensor
            kept = self._buffers.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[key] = kept.copy_(tensor, non_blocking=True)
            devices |= {tensor.device} if tensor.is_cuda else set()
        # One wait for all copies. Training must not change a tensor that is still being copied.
        for device in devices:
            torch.cuda.synchronize(device)
        self._buffers = buffers
        return [dataclasses.replace(part, tensor=buffers[part.name, part.offsets]) for part in parts]


class Background:
    """One save on one rank, under way. `error`: what it ended with, on this rank."""

    def __init__(self, save: PreparedSave, commit: Commit, discard: Callable[[], None], timeout: float) -> None:
        self.save = save
        self.result: tuple[int, tuple[str, ...]] = (0, ())
        self.error: DsjobError | None = None
        self.started = time.monotonic()
        self._commit, self._discard, self._timeout = commit, discard, timeout
        self._took = 0.0  # seconds that its own part took
        self._waiting: float | None = None  # since when other ranks' parts are missing, and none has come
        self._abandoned = threading.Event()
        # A daemon: a process that ends leaves what is not committed, as one that is killed.
        self._thread = threading.Thread(target=self._run, name="dsjob-save", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread is done on this rank."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Makes rank 0 wait for other ranks no longer: one of them has failed."""
        self._abandoned.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the thread; whether it is done."""
        self._thread.join(seconds)
        return self.ended

    def give_up(self, seconds: float) -> None:
        """Waits where the run ends with an error; while other ranks' parts are missing, which may never come, no longer
        than for its own."""
        began = time.monotonic()
        while not self.wait(0.05) and time.monotonic() - began < seconds:
            since = self._waiting
            if since is not None and time.monotonic() - max(since, began) > max(patience.TO_CATCH_UP, self._took):
                return

    def _run(self) -> None:
        save = self.save
        try:
            own = write_shard(save.url, save.rank, save.world_size, save.parts)
            self._took = time.monotonic() - self.started
            if save.rank == 0:
                self.result = self._commit([own, *self._await_records()])
        except BaseException as error:  # whatever it is: a save that ends silently would be taken for a good one
            self.error = as_told(save.rank, error)
            self._tell()

    def _tell(self) -> None:
        """Lets rank 0 know, and clears away there; whatever stands in the way of that has been told already."""
        try:
            if self.save.rank == 0:
                self._discard()
            else:
                write_record(self.save.url, self.save.rank, {"rank": self.save.rank, "error": str(self.error)})
        except FencedError as error:
            self.error = error
        except Exception:
            return

    def _read_record(self, rank: int) -> dict[str, Any]:
        for pause in (0.1, 1.0):
            try:
                return read_record(self.save.url, rank)
            except CorruptCheckpointError:  # damaged on its way here, or where it lies: the next answer tells
                time.sleep(pause)
        return read_record(self.save.url, rank)

    def _await_records(self) -> list[dict[str, Any]]:
        """The completion records of the other ranks, in their order."""
        # Polled, not gathered: a collective here would mix with those of training, in an order that differs by rank.
        folder, pause = storage.join(self.save.url, "done"), 0.02
        missing = {f"r{rank:05d}.json": rank for rank in range(1, self.save.world_size)}
        found: dict[int, dict[str, Any]] = {}
        while missing:
            there = missing.keys() & set(storage.list_names(folder))
            # Restarts whenever a record comes: `give_up` measures how long nothing has come.
            self._waiting = None if there else self._waiting or time.monotonic()
            for name in there:
                rank = missing[name]
                record = self._read_record(rank)
                del missing[name]
                if "error" in record:
                    raise ElsewhereError(f"rank {rank} could not write its part of {self.save.url}: {record['error']}")
                found[rank] = record
            waited = time.monotonic() - self.started
            if missing and (waited > self._timeout or self._abandoned.wait(pause)):
                self._waiting = None  # what is left is to clear away
                ranks = ", ".join(map(str, sorted(missing.values())))
                raise ElsewhereError(f"no completion record of rank {ranks} in {folder} after {waited:.0f} s")
            pause = min(1.0, pause * 1.5)
        return [found[rank] for rank in sorted(found)]
