"""Saves in the background: each rank copies its tensors to the host, and a thread writes them while training continues.

The threads use no collectives, because those would mix with the collectives of training. Instead, rank 0's thread polls
for the completion records of the other ranks, then commits.
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

PAUSES = (0.1, 1.0)  # seconds before the second and the third attempt to read a record that was damaged on its way

# Runs on rank 0: commits the checkpoint, given the records of all ranks. Returns its size in bytes, and notes.
Commit = Callable[[Sequence[dict[str, Any]]], tuple[int, tuple[str, ...]]]


class ElsewhereError(CheckpointError):
    """Another rank could not write its part. That rank reports the cause."""


class Staging:
    """Host memory for copies of a rank's parts. Every save reuses it. It is pinned if the parts are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Copies the parts, so that training may change the originals."""
        buffers, devices = {}, set()
        for part in parts:
            key, tensor = (part.name, part.offsets), part.tensor
            kept = self._buffers.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[key] = kept.copy_(tensor, non_blocking=True)
            devices |= {tensor.device} if tensor.is_cuda else set()
        # Wait once for all copies: training must not change a tensor that is still being copied.
        for device in devices:
            torch.cuda.synchronize(device)
        self._buffers = buffers
        return [dataclasses.replace(part, tensor=buffers[part.name, part.offsets]) for part in parts]


class Background:
    """A running background save on one rank. `error`: why it failed on this rank."""

    def __init__(self, save: PreparedSave, commit: Commit, discard: Callable[[], None], timeout: float) -> None:
        self.save = save
        self.result: tuple[int, tuple[str, ...]] = (0, ())
        self.error: DsjobError | None = None
        self.started = time.monotonic()
        self._commit, self._discard, self._timeout = commit, discard, timeout
        self._took = 0.0  # seconds to write this rank's part
        self._waiting: float | None = None  # when rank 0 began to wait for other ranks, or last saw one of them finish
        self._abandoned = threading.Event()
        # A daemon thread: it does not keep an ending process alive. An uncommitted save is then left as after a kill.
        self._thread = threading.Thread(target=self._run, name="dsjob-save", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has finished on this rank."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Tells rank 0 to stop waiting for other ranks, because one of them has failed."""
        self._abandoned.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the thread. Returns whether it has finished."""
        self._thread.join(seconds)
        return self.ended

    def give_up(self, seconds: float) -> None:
        """Waits up to `seconds` when the run ends with an error.

        Parts of other ranks may never arrive, so rank 0 waits for them only about as long as its own part took.
        """
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
        except BaseException as error:  # any error at all: otherwise a failed save would look like a successful one
            # As an error that can be pickled: `settle` sends it to all ranks.
            self.error = as_told(save.rank, error)
            self._report_failure()

    def _report_failure(self) -> None:
        """Writes the error where rank 0 finds it; on rank 0, deletes the unfinished save.

        Errors here are ignored, since they follow from the one that will be reported.
        """
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
        for pause in PAUSES:
            try:
                return read_record(self.save.url, rank)
            except CorruptCheckpointError:  # damaged in transit or in the store? Reading again shows which.
                time.sleep(pause)
        return read_record(self.save.url, rank)

    def _await_records(self) -> list[dict[str, Any]]:
        """Waits for the completion records of the other ranks, and returns them in rank order."""
        # Polled rather than gathered: a collective here would interleave with those of training, in a different order
        # on each rank, and deadlock.
        folder, pause = storage.join(self.save.url, "done"), 0.02
        missing = {f"r{rank:05d}.json": rank for rank in range(1, self.save.world_size)}
        found: dict[int, dict[str, Any]] = {}
        while missing:
            there = missing.keys() & set(storage.list_names(folder))
            # Restarts whenever a record arrives: `give_up` measures how long none has.
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
                self._waiting = None  # from here on, rank 0 only cleans up
                ranks = ", ".join(map(str, sorted(missing.values())))
                raise ElsewhereError(f"no completion record of rank {ranks} in {folder} after {waited:.0f} s")
            pause = min(1.0, pause * 1.5)
        return [found[rank] for rank in sorted(found)]
