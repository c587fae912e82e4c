"""Saves and loads an engine. All ranks take part.

A save writes, in this order: shards and completion records, state, manifest, commit record, `latest`; then it applies
retention. Nothing counts as saved before its commit record is durable.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.live.background import Background, ElsewhereError, Staging
from dsjob.checkpoint.live.capture import Capture
from dsjob.checkpoint.live.committed import Loaded, Matched, Saved
from dsjob.checkpoint.live.joint import Savable
from dsjob.checkpoint.live.loading import Loader, Take
from dsjob.checkpoint.live.objects import Kept
from dsjob.checkpoint.live.prepared import PreparedSave
from dsjob.checkpoint.live.shards import write_shard
from dsjob.checkpoint.root.attempts import Lineage
from dsjob.checkpoint.root.catalog import Catalog, noting
from dsjob.checkpoint.root.claimed import ClaimedRoot
from dsjob.checkpoint.root.retention import Retention
from dsjob.errors import CheckpointError, DsjobError
from dsjob.ranks.agreement import all_gather, gather_on_rank_0, on_all_ranks, on_rank_0
from dsjob.ranks.mesh import World
from dsjob.terminal import warn


class Checkpointer:
    """The checkpoints in one root. Every rank must call each method; rank 0 does what needs doing only once.

    With model parallelism, each rank saves its own part of the model under names of its own (see `joint`). A job calls
    `open` before it loads, which fences its older runs. A program that only calls `save_checkpoint` does not.
    """

    def __init__(
        self,
        url: str,
        *,
        world: World,
        retention: Retention | None = None,
        lineage: Lineage | None = None,
        job: Mapping[str, Any] | None = None,
        single_writer: bool = False,
        timeout: float = 1800.0,
        objects: Kept | None = None,
    ) -> None:
        self.url, self._job = url, job
        objects = Kept() if objects is None else objects
        self._everyone = world.everyone
        self._timeout = timeout
        self._catalog = Catalog(url)
        self._root = ClaimedRoot(  # for rank 0
            self._catalog, retention or Retention(), lineage or Lineage(), single_writer=single_writer
        )
        self._loader = Loader(url, world, self._catalog, objects)
        self._capture, self._staging = Capture(world, objects), Staging()
        self._background: Background | None = None
        self._last: tuple[str, dict[str, Any]] | None = None  # tag and plain values of the last save
        self._unrated: Mapping[str, float] | None = None  # metrics to add to the background save once it has finished

    def open(self) -> None:
        """Begins a new attempt: fences older ones, and deletes their unfinished saves.

        Raises CheckpointError if the store cannot create files exclusively, StorageError.
        """

        def begin() -> None:
            for note in self._root.claim():
                warn(f"could not delete leftovers of older runs: {note}", stacklevel=2)

        on_rank_0(self._everyone, begin)

    def tags(self) -> list[str]:
        """See Catalog.tags."""
        return on_rank_0(self._everyone, self._catalog.tags)

    def list_others(self) -> list[str]:
        """See ClaimedRoot.list_others. Call `open` first."""
        return on_rank_0(self._everyone, self._root.list_others)

    def rated(self) -> list[dict[str, Any]]:
        """Step, tag, folder and metrics of all checkpoints that have metrics."""
        keys = ("step", "tag", "dir", "metrics")
        read = lambda: [{key: r[key] for key in keys} for r in self._catalog.records() if "metrics" in r]  # noqa: E731
        return on_rank_0(self._everyone, read)

    def set_aside_damaged(self, tags: Sequence[str]) -> None:
        """See Catalog.set_aside_damaged."""
        on_rank_0(self._everyone, lambda: self._root.set_aside_damaged(tags))

    def set_aside(self, *, newer_than: int) -> None:
        """See Catalog.set_aside."""
        on_rank_0(self._everyone, lambda: self._root.set_aside(newer_than=newer_than))

    def save(
        self,
        engine: Savable,
        *,
        tag: str,
        client_state: Mapping[str, Any] | None = None,
        latest: bool = True,
        replace: bool = False,
        frozen: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> Saved:
        """Saves and commits a checkpoint.

        replace: overwrite an existing checkpoint with this tag. frozen: include parameters that are not trained.
        metrics: what retention compares. Raises CheckpointError or StorageError on every rank; older checkpoints stay
        intact.
        """
        assert self._background is None  # callers must settle it first, since they report how it ended
        started = time.monotonic()
        save = self._prepare(engine, tag, client_state, frozen=frozen)
        try:
            # The gather is also the barrier: rank 0 commits only when the files of all ranks are durable.
            records = gather_on_rank_0(
                self._everyone, lambda: write_shard(save.url, save.rank, save.world_size, save.parts)
            )
            size, notes = on_rank_0(self._everyone, lambda: self._commit(save, records, latest, replace, metrics or {}))
        except DsjobError:
            on_rank_0(self._everyone, lambda: self._root.discard(save.tag, save.folder))
            raise
        self._last = (tag, save.values)
        return Saved(tag, save.url, size, time.monotonic() - started, notes)

    def rate(self, engine: Savable, *, tag: str, metrics: Mapping[str, float], outdated: bool = False) -> bool:
        """Adds `metrics` to the checkpoint `tag` if it is the last save, no plain value has changed since, and rank 0
        does not call it `outdated`. Returns whether it did. A background save gets its metrics when it is settled.
        Raises CheckpointError or StorageError on every rank."""
        # If a plain value has changed since the save (a callback's state, say), state.json is outdated. Then the caller
        # must save again.
        values = self._capture.describe(engine)

        def add() -> bool:
            if outdated or self._last != (tag, values):
                return False
            if self._background is not None:
                self._unrated = metrics
            else:
                self._root.rate(tag, metrics)
            return True

        return on_rank_0(self._everyone, add)

    def save_behind(
        self, engine: Savable, *, tag: str, metrics: Mapping[str, float] | None = None, replace: bool = False
    ) -> None:
        """Like `save`, but returns as soon as everything is copied. `settle` returns the result."""
        assert self._background is None
        save = self._prepare(engine, tag, None, frozen=True)
        # Training waits only for these copies.
        save = dataclasses.replace(save, parts=on_all_ranks(self._everyone, lambda: self._staging.copy(save.parts)))

        def commit(records: Sequence[dict[str, Any]]) -> tuple[int, tuple[str, ...]]:
            return self._commit(save, records, latest=True, replace=replace, metrics=metrics or {})

        discard = lambda: self._root.discard(save.tag, save.folder)  # noqa: E731
        self._background = Background(save, commit, discard, self._timeout)
        self._last, self._unrated = (tag, save.values), None

    @property
    def has_news(self) -> bool:
        """Whether this rank knows that the background save has ended. Then all ranks must call `settle`."""
        running = self._background
        return running is not None and (running.error is not None or (self._everyone.rank == 0 and running.ended))

    def settle(self) -> Saved | None:
        """Waits for the background save and returns it; None if there is none. Raises its error on every rank."""
        running, self._background = self._background, None
        if running is None:
            return None
        errors, ended = [], False
        # Ranks exchange their states once a second. Waiting until the own thread ends, then gathering, could keep the
        # other ranks in the collective until it times out.
        while not ended:
            running.wait(1.0)
            # `ended` is read before `error`: once it is true, `error` no longer changes.
            states = all_gather(self._everyone, (running.ended, running.error))
            errors, ended = [error for _, error in states if error is not None], all(done for done, _ in states)
            if errors:
                running.abandon()
        if errors:
            self._last = None
            raise next((error for error in errors if not isinstance(error, ElsewhereError)), errors[0])
        size, notes = on_rank_0(self._everyone, lambda: self._finish(running))
        return Saved(running.save.tag, running.save.url, size, time.monotonic() - running.started, notes)

    def _finish(self, running: Background) -> tuple[int, tuple[str, ...]]:
        """The result of a background save, on rank 0. Adds the metrics that arrived while it ran."""
        (size, notes), metrics = running.result, self._unrated
        if metrics is not None:
            notes += noting(lambda: self._root.rate(running.save.tag, metrics))
        return size, notes

    def give_up(self, seconds: float) -> None:
        """Waits up to `seconds` for a background save when the run ends with an error. Not a collective."""
        if self._background is not None:
            self._background.give_up(seconds)

    def _prepare(
        self, engine: Savable, tag: str, client_state: Mapping[str, Any] | None, *, frozen: bool
    ) -> PreparedSave:
        if not layout.NAME.fullmatch(tag):
            raise CheckpointError(f"invalid checkpoint tag {tag!r}", hint="use letters, digits, '.', '_' and '-'")
        client_state, name = client_state or {}, lambda: self._root.name_folder(tag)
        return self._capture.prepare(engine, self.url, tag, client_state, name, frozen=frozen)

    def _commit(
        self,
        save: PreparedSave,
        records: Sequence[dict[str, Any]],
        latest: bool,
        replace: bool,
        metrics: Mapping[str, float],
    ) -> tuple[int, tuple[str, ...]]:
        """Rank 0's part after all shards are written. Returns their bytes, and what failed after the commit."""
        # `complete` checks the sizes of all shards again, in case a store lost one after acknowledging it.
        manifest = save.complete(records, self._job)
        notes = self._root.commit(save.folder, manifest, latest=latest, replace=replace, metrics=metrics)
        return sum(entry["size"] for entry in manifest["files"].values()), notes

    def follow_latest(self) -> tuple[str | None, str]:
        """See Catalog.follow_latest. A collective."""
        return on_rank_0(self._everyone, self._catalog.follow_latest)

    def load(
        self,
        engine: Savable,
        *,
        tag: str | None = None,
        strict: bool = True,
        optimizer: bool = True,
        scheduler: bool = True,
        seed: int = 0,
        take: Take | None = None,
    ) -> Loaded:
        """Loads a committed checkpoint (by default the newest) into the engine, whatever world size saved it.

        It also loads checkpoints of other programs (see `elsewhere`): a full training state, or only weights.
        strict: the names of the model's and the checkpoint's parameters and buffers must be the same. seed: reseeds the
        random generators if the world size differs. take: receives the weights by name, whole on every rank, instead of
        loading them into the model. Raises NoCheckpointError, CorruptCheckpointError, CheckpointError.
        """
        return self._loader.load(
            engine, tag=tag, strict=strict, optimizer=optimizer, scheduler=scheduler, seed=seed, take=take
        )

    def load_weights(self, engine: Savable, source: str, *, strict: bool = True, ema: bool = False) -> Matched:
        """Loads only the weights from a checkpoint of another job: its run folder, root or step folder, path or URL.

        strict: all names and shapes must match. Otherwise, what matches is loaded. ema: load averages in place of
        the weights; raises UsageError if there are none. Returns what matched.
        """
        return self._loader.load_weights(engine, source, strict=strict, ema=ema)
