"""Saves and loads an engine. All ranks take part.

A save writes, in this order: shards and completion records, state, manifest, commit record, `latest`; then it applies
retention. Nothing counts as saved before its commit record is durable.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import CLIENT, encode
from dsjob.checkpoint.live.background import Background, ElsewhereError, Staging
from dsjob.checkpoint.live.committed import Loaded, Matched, Saved
from dsjob.checkpoint.live.joint import JointState, Savable, view_state
from dsjob.checkpoint.live.loading import Loader, Take
from dsjob.checkpoint.live.objects import Kept, capture_objects
from dsjob.checkpoint.live.prepared import PreparedSave, describe_state
from dsjob.checkpoint.live.rng import capture_rng
from dsjob.checkpoint.live.shards import Planner, write_shard
from dsjob.checkpoint.live.state import TrainingState
from dsjob.checkpoint.root.attempts import Attempt, claim, claim_once
from dsjob.checkpoint.root.catalog import Catalog, noting
from dsjob.checkpoint.root.garbage import clear
from dsjob.checkpoint.root.retention import Retention
from dsjob.errors import CheckpointError, DsjobError, FencedError
from dsjob.ranks.agreement import all_gather, gather_on_rank_0, on_all_ranks, on_rank_0
from dsjob.ranks.mesh import World


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
        job: Mapping[str, Any] | None = None,
        single_writer: bool = False,
        timeout: float = 1800.0,
        objects: Kept | None = None,
    ) -> None:
        self.url, self._job, self._objects = url, job, Kept() if objects is None else objects
        self._everyone, self._data_rank, self._model = world.everyone, world.data_rank, world.model
        self._retention, self._single_writer, self._timeout = retention or Retention(), single_writer, timeout
        self._catalog = Catalog(url)
        self._loader = Loader(url, world, self._catalog, self._objects)
        self._planner, self._staging = Planner(self._everyone), Staging()
        self._background: Background | None = None
        self._attempt: Attempt | None = None  # only on rank 0
        self._last: tuple[str, dict[str, Any]] | None = None  # tag and plain values of the last save
        self._unrated: Mapping[str, float] | None = None  # metrics to add to the background save once it has finished

    def open(self) -> None:
        """Begins a new attempt: fences older ones, and deletes their unfinished saves.

        Raises CheckpointError if the store cannot create files exclusively, StorageError.
        """

        def begin() -> None:
            self._attempt = claim(self.url, single_writer=self._single_writer)
            for note in clear(self.url, self._attempt):
                warnings.warn(f"could not delete leftovers of older runs: {note}", stacklevel=2)

        on_rank_0(self._everyone, begin)

    def tags(self) -> list[str]:
        """See Catalog.tags."""
        return on_rank_0(self._everyone, self._catalog.tags)

    def rated(self) -> list[dict[str, Any]]:
        """Step, tag and metrics of all checkpoints that have metrics."""
        keys = ("step", "tag", "metrics")
        read = lambda: [{key: r[key] for key in keys} for r in self._catalog.records() if "metrics" in r]  # noqa: E731
        return on_rank_0(self._everyone, read)

    def set_aside_damaged(self, tags: Sequence[str]) -> None:
        """See Catalog.set_aside_damaged."""
        on_rank_0(self._everyone, lambda: self._catalog.set_aside_damaged(tags, self._attempt))

    def set_aside(self, *, newer_than: int) -> None:
        """See Catalog.set_aside."""
        on_rank_0(self._everyone, lambda: self._catalog.set_aside(newer_than, self._attempt))

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
        save = self._prepare(engine, tag, client_state, frozen)
        try:
            # The gather is also the barrier: rank 0 commits only when the files of all ranks are durable.
            records = gather_on_rank_0(
                self._everyone, lambda: write_shard(save.url, save.rank, save.world_size, save.parts)
            )
            size, notes = on_rank_0(self._everyone, lambda: self._commit(save, records, latest, replace, metrics or {}))
        except DsjobError:
            on_rank_0(self._everyone, lambda: self._discard(save))
            raise
        self._last = (tag, save.values)
        return Saved(tag, save.url, size, time.monotonic() - started, notes)

    def rate(self, engine: Savable, *, tag: str, metrics: Mapping[str, float], outdated: bool = False) -> bool:
        """Adds `metrics` to the checkpoint `tag` if it is the last save, no plain value has changed since, and rank 0
        does not call it `outdated`. Returns whether it did. A background save gets its metrics when it is settled.
        Raises CheckpointError or StorageError on every rank."""
        # If a plain value has changed since the save (a callback's state, say), state.json is outdated. Then the caller
        # must save again.
        state = view_state(engine, self._model)
        _, values = self._describe(engine, state, {**state.model_tensors(), **state.optimizer_tensors()}, encode({}))

        def add() -> bool:
            assert self._attempt is not None
            if outdated or self._last != (tag, values):
                return False
            if self._background is not None:
                self._unrated = metrics
            else:
                self._add(tag, metrics, self._attempt)
            return True

        return on_rank_0(self._everyone, add)

    def _add(self, tag: str, metrics: Mapping[str, float], attempt: Attempt) -> None:
        self._catalog.rate(tag, metrics, attempt)
        self._catalog.mark_best(self._retention.best)
        self._catalog.retire(self._retention, attempt)

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

        self._background = Background(save, commit, lambda: self._discard(save), self._timeout)
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
        (size, notes), metrics, attempt = running.result, self._unrated, self._attempt
        assert attempt is not None
        if metrics is not None:
            notes += noting(lambda: self._add(running.save.tag, metrics, attempt))
        return size, notes

    def give_up(self, seconds: float) -> None:
        """Waits up to `seconds` for a background save when the run ends with an error. Not a collective."""
        if self._background is not None:
            self._background.give_up(seconds)

    def _discard(self, save: PreparedSave) -> None:
        """Deletes a failed save. Raises FencedError if a newer run has begun, which may be why it failed."""
        assert self._attempt is not None
        try:
            self._catalog.discard(save.tag, save.folder)
            self._attempt.require_newest()
        except FencedError:
            raise
        except DsjobError:  # likely the same cause as the failed save; the next run deletes what is left
            pass

    def _prepare(self, engine: Savable, tag: str, client_state: Mapping[str, Any] | None, frozen: bool) -> PreparedSave:
        """Plans a save, and captures all plain values. A collective."""
        if not layout.NAME.fullmatch(tag):
            raise CheckpointError(f"invalid checkpoint tag {tag!r}", hint="use letters, digits, '.', '_' and '-'")
        state = view_state(engine, self._model)
        state = state if frozen else state.without_frozen()
        tensors = {**state.model_tensors(), **state.optimizer_tensors()}
        stored: dict[str, Tensor] = {}
        client = on_all_ranks(
            self._everyone, lambda: encode(dict(client_state or {}), "client_state", tensors=True, stored=stored)
        )
        # Describe before adding the client's tensors: they are not part of the model, so `state` has no role for them.
        plain, values = self._describe(engine, state, tensors, client)
        tensors.update(stored if self._everyone.rank == 0 else {})  # only rank 0's client state is saved
        parts, described = self._planner.plan(tensors)
        # Only rank 0 knows the attempt, so it chooses the folder for all ranks.
        folder = on_rank_0(self._everyone, lambda: self._begin_attempt().name_folder(tag))
        manifest = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "tag": tag,
            "step": engine.counters()["global_steps"],
            "world_size": self._everyone.size,
            "zero_stage": engine.zero_stage,
            "aliases": {f"model.{name}": f"model.{target}" for name, target in plain["aliases"].items()},
            **({"models": plain["models"]} if plain["models"] else {}),
            **({"model_ranks": self._model.size} if self._model.size > 1 else {}),
            **({"pretrained": plain["pretrained"]} if plain["pretrained"] else {}),
        }
        return PreparedSave(
            url=storage.join(self.url, folder),
            folder=folder,
            tag=tag,
            rank=self._everyone.rank,
            world_size=self._everyone.size,
            parts=parts,
            described=described,
            roles={**plain["roles"], **dict.fromkeys(stored, CLIENT)},
            values=values,
            manifest=manifest,
        )

    def _describe(
        self,
        engine: Savable,
        state: TrainingState | JointState,
        tensors: Mapping[str, Any],
        client: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The result of `describe_state`, and on rank 0 the content of state.json. A collective."""
        own = on_all_ranks(self._everyone, lambda: describe_state(state, tensors))
        plain = self._join_parts(own)
        objects = capture_objects(self._everyone, self._objects)
        # Each rank draws its own random numbers, so state.json has an entry per rank.
        random = gather_on_rank_0(self._everyone, lambda: capture_rng(state.device))
        values = {
            "counters": engine.counters(),
            **{key: plain[key] for key in ("optimizer", "scheduler", "loss_scaler")},
            "rng": {str(rank): entry for rank, entry in enumerate(random)},
            "client_state": client,
            **({"objects": objects} if objects else {}),
        }
        return plain, values

    def _join_parts(self, own: dict[str, Any]) -> dict[str, Any]:
        """Merges the results of `describe_state` of all model-parallel ranks. A collective, if there are several."""
        if self._model.size == 1:
            return own
        # One rank per part of the model is enough: its data-parallel copies hold the same state.
        found = all_gather(self._everyone, own if self._data_rank == 0 else None)
        parts = [part for part in found if part is not None]
        models = sorted(name for part in parts for name in part.pop("models"))
        joined = {key: {name: value for part in parts for name, value in part[key].items()} for key in parts[0]}
        return {**joined, "models": models}

    def _begin_attempt(self) -> Attempt:
        """The attempt of this run, or a new one for a program that has not called `open`."""
        self._attempt = self._attempt or claim_once(self.url)
        self._attempt.require_newest()
        return self._attempt

    def _commit(
        self,
        save: PreparedSave,
        records: Sequence[dict[str, Any]],
        latest: bool,
        replace: bool,
        metrics: Mapping[str, float],
    ) -> tuple[int, tuple[str, ...]]:
        """Rank 0's part after all shards are written. Returns their bytes, and what failed after the commit."""
        assert self._attempt is not None
        # `complete` checks the sizes of all shards again, in case a store lost one after acknowledging it.
        attempt = self._attempt
        manifest = save.complete(records, self._job)
        notes = self._catalog.commit(save.folder, manifest, attempt, latest=latest, replace=replace, metrics=metrics)
        notes += noting(lambda: self._catalog.mark_best(self._retention.best))
        notes += noting(lambda: self._catalog.retire(self._retention, attempt))
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

    def load_weights(self, engine: Savable, source: str, *, strict: bool = True) -> Matched:
        """Loads only the weights from a checkpoint of another job: its run folder, root or step folder, path or URL.

        strict: all names and shapes must match. Otherwise, what matches is loaded. Returns what matched.
        """
        return self._loader.load_weights(engine, source, strict=strict)
