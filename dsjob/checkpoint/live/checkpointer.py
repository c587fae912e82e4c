"""Saving and loading an engine, all ranks together.

Order of a save: shards and completion records, state, manifest, commit record, `latest`, then retention. Nothing
counts as saved before its commit record is durable.
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
    """The checkpoints below one URL. Every rank calls each method; rank 0 does what is done once.

    Model-parallel ranks have a part of the model each, with names and values of its own: see `joint`.
    A job opens it before it loads, and so fences its older runs; a program that saves now and then does not.
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
        self._attempt: Attempt | None = None  # rank 0 alone has one
        self._last: tuple[str, dict[str, Any]] | None = None  # tag and values of the last save
        self._unrated: Mapping[str, float] | None = None  # metrics of the one in the background, to be kept after it

    def open(self) -> None:
        """Begins a new attempt, which fences the older ones, and clears away what they have left unfinished.

        Raises CheckpointError where the store cannot tell which of two writers was first, StorageError.
        """

        def begin() -> None:
            self._attempt = claim(self.url, single_writer=self._single_writer)
            for note in clear(self.url, self._attempt):
                warnings.warn(f"what older runs left is not cleared away: {note}", stacklevel=2)

        on_rank_0(self._everyone, begin)

    def tags(self) -> list[str]:
        """See Catalog.tags."""
        return on_rank_0(self._everyone, self._catalog.tags)

    def rated(self) -> list[dict[str, Any]]:
        """Step, tag and metrics of the checkpoints whose metrics were kept."""
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
        """Saves and commits; `replace`: also where the tag is taken; `frozen`: with parameters that are not trained;
        `metrics`: what `retention` may judge it by.

        Every rank gets CheckpointError or StorageError; older saves stay whole.
        """
        assert self._background is None  # callers settle it first, since they have to tell of it
        started = time.monotonic()
        save = self._prepare(engine, tag, client_state, frozen)
        try:
            # Doubles as the barrier: rank 0 goes on once every rank's file is durable, or with the error of one.
            records = gather_on_rank_0(
                self._everyone, lambda: write_shard(save.url, save.rank, save.world_size, save.parts)
            )
            size, notes = on_rank_0(self._everyone, lambda: self._commit(save, records, latest, replace, metrics or {}))
        except DsjobError:
            on_rank_0(self._everyone, lambda: self._discard(save))
            raise
        self._last = (tag, save.values)
        return Saved(tag, save.url, size, time.monotonic() - started, notes)

    def rate(self, engine: Savable, *, tag: str, metrics: Mapping[str, float]) -> bool:
        """Adds `metrics` to the checkpoint `tag`, if it was saved last and is, but for tensors, the state of now;
        whether it is. One in the background gets them when it is settled. Every rank gets CheckpointError or
        StorageError."""
        # If anything but tensors has changed since the save, its state.json would be wrong: the caller then saves
        # again.
        state = view_state(engine, self._model)
        _, values = self._describe(engine, state, {**state.model_tensors(), **state.optimizer_tensors()}, encode({}))

        def add() -> bool:
            assert self._attempt is not None
            if self._last != (tag, values):
                return False
            if self._background is not None:
                self._unrated = metrics
            else:
                self._add(tag, metrics, self._attempt)
            return True

        return on_rank_0(self._everyone, add)

    def _add(self, tag: str, metrics: Mapping[str, float], attempt: Attempt) -> None:
        self._catalog.rate(tag, metrics, attempt)
        self._catalog.retire(self._retention, attempt)

    def save_behind(
        self, engine: Savable, *, tag: str, metrics: Mapping[str, float] | None = None, replace: bool = False
    ) -> None:
        """As `save`, but comes back once there are copies of everything: `settle` tells how it ended."""
        assert self._background is None
        save = self._prepare(engine, tag, None, frozen=True)
        # The copies are all that the loop waits for.
        save = dataclasses.replace(save, parts=on_all_ranks(self._everyone, lambda: self._staging.copy(save.parts)))

        def commit(records: Sequence[dict[str, Any]]) -> tuple[int, tuple[str, ...]]:
            return self._commit(save, records, latest=True, replace=replace, metrics=metrics or {})

        self._background = Background(save, commit, lambda: self._discard(save), self._timeout)
        self._last, self._unrated = (tag, save.values), None

    @property
    def has_news(self) -> bool:
        """Whether a save in the background has ended, as far as this rank knows: then all have to `settle`."""
        running = self._background
        return running is not None and (running.error is not None or (self._everyone.rank == 0 and running.ended))

    def settle(self) -> Saved | None:
        """Waits for a save in the background; None where there is none. Raises on every rank what it ended with."""
        running, self._background = self._background, None
        if running is None:
            return None
        errors, ended = [], False
        while not ended:  # together, so that no rank waits in a collective longer than that may take
            running.wait(1.0)
            told = all_gather(self._everyone, (running.ended, running.error))  # in this order: an end is final
            errors, ended = [error for _, error in told if error is not None], all(done for done, _ in told)
            if errors:
                running.abandon()
        if errors:
            self._last = None
            raise next((error for error in errors if not isinstance(error, ElsewhereError)), errors[0])
        size, notes = on_rank_0(self._everyone, lambda: self._finish(running))
        return Saved(running.save.tag, running.save.url, size, time.monotonic() - running.started, notes)

    def _finish(self, running: Background) -> tuple[int, tuple[str, ...]]:
        """What a save in the background comes to, on rank 0; adds the metrics that it was given while it went on."""
        (size, notes), metrics, attempt = running.result, self._unrated, self._attempt
        assert attempt is not None
        if metrics is not None:
            notes += noting(lambda: self._add(running.save.tag, metrics, attempt))
        return size, notes

    def give_up(self, seconds: float) -> None:
        """Lets a save in the background end, where the run itself ends with an error; not a collective."""
        if self._background is not None:
            self._background.give_up(seconds)

    def _discard(self, save: PreparedSave) -> None:
        """Clears away a save that has failed. Raises FencedError where a newer run has begun, which may be why."""
        assert self._attempt is not None
        try:
            self._catalog.discard(save.tag, save.folder)
            self._attempt.require_newest()
        except FencedError:
            raise
        except DsjobError:  # what made the save fail stands in the way here too: the next run clears it away
            pass

    def _prepare(self, engine: Savable, tag: str, client_state: Mapping[str, Any] | None, frozen: bool) -> PreparedSave:
        """Plans a save, and takes down all that is no tensor. A collective."""
        if not layout.NAME.fullmatch(tag):
            raise CheckpointError(f"{tag!r} is no name for a checkpoint", hint="letters, digits, '.', '_' and '-'")
        state = view_state(engine, self._model)
        state = state if frozen else state.without_frozen()
        tensors = {**state.model_tensors(), **state.optimizer_tensors()}
        stored: dict[str, Tensor] = {}
        client = on_all_ranks(
            self._everyone, lambda: encode(dict(client_state or {}), "client_state", tensors=True, stored=stored)
        )
        # Roles are asked for before the client's tensors join: these are no tensors of the model.
        plain, values = self._describe(engine, state, tensors, client)
        tensors.update(stored if self._everyone.rank == 0 else {})  # the client state of rank 0 is the one that is kept
        parts, described = self._planner.plan(tensors)
        # Only rank 0 knows the attempt, so it names the folder for all.
        folder = on_rank_0(self._everyone, lambda: self._begin_attempt().name_folder(tag))
        manifest = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "tag": tag,
            "step": engine.counters()["global_steps"],
            "world_size": self._everyone.size,
            "zero_stage": engine.zero_optimization_stage(),
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
        """What `describe_state` gives, and on rank 0 what state.json holds. A collective."""
        own = on_all_ranks(self._everyone, lambda: describe_state(state, tensors))
        plain = self._join_parts(own)
        objects = capture_objects(self._everyone, self._objects)
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
        """What `describe_state` gives, with the parts of all model-parallel ranks. A collective where there are any."""
        if self._model.size == 1:
            return own
        found = all_gather(self._everyone, own if self._data_rank == 0 else None)
        parts = [part for part in found if part is not None]
        models = sorted(name for part in parts for name in part.pop("models"))
        joined = {key: {name: value for part in parts for name, value in part[key].items()} for key in parts[0]}
        return {**joined, "models": models}

    def _begin_attempt(self) -> Attempt:
        """The attempt of this run, or of a program that has not opened the root."""
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
        """Rank 0's part once all shards are written; the bytes of them, and what failed once they were committed."""
        assert self._attempt is not None
        # `complete` reads the sizes of all shards again: a store may have lost one after acknowledging it.
        attempt = self._attempt
        manifest = save.complete(records, self._job)
        notes = self._catalog.commit(save.folder, manifest, attempt, latest=latest, replace=replace, metrics=metrics)
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
        """Loads a committed checkpoint (the newest where no tag is given) into the engine, whatever its world size.

        What another program saved there (see `elsewhere`) is loaded too: a run goes on, or weights alone are taken.
        `strict`: every parameter and buffer of the model has to be in it, and the other way round. `seed`: what random
        generators are re-seeded from where the world size is another one. `take`: is given the weights by name, whole
        on every rank, in place of reading them into the model. Raises NoCheckpointError, CorruptCheckpointError,
        CheckpointError.
        """
        return self._loader.load(
            engine, tag=tag, strict=strict, optimizer=optimizer, scheduler=scheduler, seed=seed, take=take
        )

    def load_weights(self, engine: Savable, source: str, *, strict: bool = True) -> Matched:
        """Loads the weights alone from another job's checkpoint: its run folder, root or step folder, by path or URL.

        `strict`: all have to match in name and shape; where not, what does is loaded. Returns what matched.
        """
        return self._loader.load_weights(engine, source, strict=strict)
