"""Loads committed checkpoints, and those of other programs, into an engine. All ranks take part.

The engine changes only after the sizes of all files and the names and shapes of the model's tensors were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.averages import has_averages, take_averages
from dsjob.checkpoint.format.dtypes import DTYPES
from dsjob.checkpoint.format.values import CLIENT, decode
from dsjob.checkpoint.live.committed import (
    Loaded,
    Matched,
    describe_left_out,
    match,
    read_checkpoint,
    require_match,
    require_sizes,
    run_dcp,
)
from dsjob.checkpoint.live.joint import JointState, Savable, name_part, view_state
from dsjob.checkpoint.live.objects import Kept, restore_objects
from dsjob.checkpoint.live.rng import restore_rng
from dsjob.checkpoint.live.shards import ShardReader
from dsjob.checkpoint.live.split_tensors import LoadPlanner
from dsjob.checkpoint.live.state import Saved, TrainingState
from dsjob.checkpoint.other.elsewhere import find_elsewhere
from dsjob.checkpoint.other.foreign import Foreign
from dsjob.checkpoint.root.best import choose_weights
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.run_state import read_job, read_values, restoring
from dsjob.checkpoint.root.source import locate, open_root, renamed
from dsjob.errors import CheckpointError
from dsjob.ranks.agreement import all_gather, on_all_ranks, on_rank_0
from dsjob.ranks.mesh import World
from dsjob.ranks.seeding import seed_rng

T = TypeVar("T")


Take = Callable[[dict[str, Tensor]], None]  # receives the weights by name: whole tensors, on the CPU


def _make_tensors(checkpoint: layout.Checkpoint, roles: Sequence[str]) -> dict[str, Tensor]:
    """Empty tensors for all tensors with one of `roles`: whole, on the CPU."""
    found = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.role in roles}
    return {name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]) for name, tensor in found.items()}


@dataclass(frozen=True)
class Opened:
    """An open checkpoint: its root, manifest, folder and plain values; `foreign` if another program saved it."""

    root: layout.Folder
    checkpoint: layout.Checkpoint
    url: str
    values: dict[str, Any]
    foreign: Foreign | None = None


class Loader:
    """Loads checkpoints from one root, whatever world size saved them. Each method is a collective."""

    def __init__(self, url: str, world: World, catalog: Catalog, objects: Kept) -> None:
        self._url, self._catalog, self._objects = url, catalog, objects
        self._everyone, self._data_rank, self._parts = world.everyone, world.data_rank, world.parts
        self._stages, self._axes, self._divided = world.pipe, world.axes, world.divided

    def load(
        self,
        engine: Savable,
        *,
        tag: str | None,
        strict: bool,
        optimizer: bool,
        scheduler: bool,
        seed: int,
        take: Take | None = None,
    ) -> Loaded:
        """See Checkpointer.load."""
        state = view_state(engine, self._parts)
        opened = self._open_any(state, tag, optimizer)
        foreign, checkpoint, url, values = opened.foreign, opened.checkpoint, opened.url, opened.values
        if foreign is not None and foreign.run is None:  # weights alone
            optimizer = scheduler = False
        ours = state.model_tensors()
        if take is None:
            found = self._match(ours, checkpoint, url)
            hint = "load it into the model that it was saved from, or train in another output.dir"
            self._require_match(found, ours, checkpoint, strict=strict or found.is_foreign, hint=hint)
            weights = {name: ours[name] for name in found.taken}
        else:  # the program receives whole tensors and may map names as it likes, so there is nothing to match
            wholes = _make_tensors(checkpoint, layout.ROLES)
            weights = dict(wholes)
        saved = {n: (t.shape, DTYPES[t.dtype]) for n, t in checkpoint.tensors.items() if t.role == "optimizer"}
        job = on_all_ranks(self._everyone, lambda: read_job(opened.root, checkpoint)) if foreign is None else None
        kept = _make_tensors(checkpoint, (CLIENT,))
        client_state = self._restore(url, lambda: decode(values.get("client_state", {}), stored=kept))
        # Everything was matched and is now allocated. From `_read` on, the engine changes.
        tensors = self._restore(url, lambda: state.make_optimizer_tensors(saved) if optimizer else {})
        self._read(opened, {**weights, **tensors, **kept})
        if take is not None:
            wholes.update({name: wholes[first] for name, first in checkpoint.aliases.items()})
            take({name.removeprefix("model."): weight for name, weight in wholes.items()})
        # Each rank has its own random generators. On a different number of ranks, they are reseeded from the seed and
        # the step, so that resuming twice gives the same numbers.
        same_world = self._is_same_world(checkpoint, values)
        others = self._find_elsewhere(ours)
        notes = self._restore(url, lambda: restore_objects(self._everyone, self._objects, values.get("objects", {})))

        def put_back() -> None:
            if optimizer:
                state.load_optimizer(tensors, values["optimizer"], others)
                state.load_scaler(values.get("loss_scaler"))  # the first checkpoints did not have this key
            if scheduler:
                state.load_scheduler(values["scheduler"], rates=optimizer)
            if same_world:
                restore_rng(values["rng"][str(self._everyone.rank)], state.device)
            else:
                seed_rng(seed + 1_000_003 * checkpoint.step + self._data_rank)

        self._restore(url, put_back)
        with restoring(url):
            engine.restore_counters(values.get("counters", engine.counters()))  # a collective: ranks gather weights
        notes += describe_left_out(saved, tensors) if optimizer else ()
        exact = same_world and optimizer and scheduler
        loaded = Loaded(checkpoint.tag, url, checkpoint.step, client_state, exact, job, notes)
        return _complete(loaded, foreign, state, optimizer) if foreign is not None else loaded

    def _open_any(self, state: TrainingState | JointState, tag: str | None, optimizer: bool) -> Opened:
        """Opens one of dsjob's checkpoints, or what another program saved there."""
        # Only rank 0 looks: ranks might see different states of a folder that another program is writing to.
        foreign = on_rank_0(self._everyone, lambda: self._find_foreign(state, tag))
        if foreign is None:
            return self._open(tag)
        values = foreign.values(state.optimizer_values() if optimizer and foreign.run is not None else {})
        return Opened(foreign.open(), foreign.checkpoint, foreign.place, values, foreign)

    def load_weights(self, engine: Savable, source: str, *, strict: bool, ema: bool) -> Matched:
        """See Checkpointer.load_weights."""

        def find() -> tuple[str, dict[str, Any]]:
            with renamed(f"read {source}"):
                root, record = locate(source, choose_weights(source, None, best=False))
                return root.root, record

        # Only rank 0 searches, so that all ranks load the same checkpoint even if a newer one is committed meanwhile.
        url, record = on_rank_0(self._everyone, find)
        root = open_root(url)
        checkpoint = on_all_ranks(self._everyone, lambda: read_checkpoint(root, record))
        averages = has_averages(checkpoint)
        checkpoint = take_averages(checkpoint) if ema else checkpoint
        opened = Opened(root, checkpoint, storage.join(url, checkpoint.folder), {})
        ours = view_state(engine, self._parts).model_tensors()
        found = self._match(ours, checkpoint, opened.url)
        if strict or not any(all_gather(self._stages, bool(found.taken))):
            hint = "checkpoint.strict=false loads what matches" if found.taken else "no weight matches the model"
            self._require_match(found, ours, checkpoint, strict=True, hint=hint)
        on_rank_0(self._everyone, lambda: require_sizes(opened.url, checkpoint))
        self._read(opened, {name: ours[name] for name in found.taken})
        engine.restore_counters(engine.counters())  # also refreshes the low-precision copies from the fp32 masters
        return replace(found, averages=averages)

    def _open(self, tag: str | None) -> Opened:
        """Opens one of dsjob's own checkpoints, by default the newest."""
        record = on_rank_0(self._everyone, lambda: self._catalog.find(tag))
        root = open_root(self._url)
        checkpoint = on_all_ranks(self._everyone, lambda: read_checkpoint(root, record))
        url = storage.join(self._url, checkpoint.folder)
        values = on_all_ranks(self._everyone, lambda: read_values(root, checkpoint))
        on_rank_0(self._everyone, lambda: require_sizes(url, checkpoint))
        return Opened(root, checkpoint, url, values)

    def _find_foreign(self, state: TrainingState | JointState, tag: str | None) -> Foreign | None:
        joint = isinstance(state, JointState)
        groups = None if joint else [group["names"] for group in state.optimizer_values().get("groups", [])]
        with renamed(f"read {self._url}"):
            found = find_elsewhere(self._url, tag, groups)
        if found is not None and joint:
            raise CheckpointError(f"{self._url} holds a single model, saved by {found.program}; this job has several")
        return found

    def _match(self, ours: Mapping[str, Saved], checkpoint: layout.Checkpoint, url: str) -> Matched:
        """See `match`. Raises CheckpointError if the number of model-parallel ranks differs."""
        saved = checkpoint.manifest.get("model_ranks", 1)
        if saved != self._parts.size:
            raise CheckpointError(
                f"{url} was saved with {saved} model-parallel rank{'s' * (saved > 1)}; this run has {self._parts.size}",
                hint="use the same number, or convert the weights of one part: `dsjob convert --model mp_rank_00`",
            )
        # Each model-parallel rank reads only its own part, by the prefix of its names.
        start = f"model.{name_part(self._parts.rank)}." if saved > 1 else "model."
        found = match(ours, checkpoint, url, start)
        others = self._find_elsewhere(ours)
        return replace(found, unused=[name for name in found.unused if name not in others])

    def _is_same_world(self, checkpoint: layout.Checkpoint, values: Mapping[str, Any]) -> bool:
        """Whether the checkpoint was saved by as many ranks, with the same axes."""
        axes = list(self._axes) if self._divided else None
        return len(values.get("rng", {})) == self._everyone.size and checkpoint.manifest.get("axes") == axes

    def _require_match(
        self, found: Matched, ours: Mapping[str, Saved], checkpoint: layout.Checkpoint, *, strict: bool, hint: str
    ) -> None:
        """See `require_match`. A stage of a pipeline raises what another one has found."""
        check = lambda: require_match(found, ours, checkpoint, strict=strict, hint=hint)  # noqa: E731
        on_all_ranks(self._stages, check)

    def _find_elsewhere(self, ours: Mapping[str, Saved]) -> set[str]:
        """The names of tensors that only other stages of the pipeline have. A collective if there are any."""
        return {name for names in all_gather(self._stages, list(ours)) for name in names} - set(ours)

    def _read(self, opened: Opened, tensors: Mapping[str, Saved]) -> None:
        """Fills `tensors`. Each rank reads only the boxes that it holds."""
        reader = ShardReader(opened.root, opened.checkpoint)
        with renamed(f"read {opened.url}"):
            # In place. For a DTensor, DCP asks only for the box of this rank; for a plain tensor, for all of it.
            run_dcp(lambda **how: dcp.load(dict(tensors), storage_reader=reader, planner=LoadPlanner(), **how))

    def _restore(self, url: str, action: Callable[[], T]) -> T:
        """Runs `action`, which restores values and must not be a collective. An error on one rank is raised on all."""

        def act() -> T:
            with restoring(url):
                return action()

        return on_all_ranks(self._everyone, act)


def _complete(loaded: Loaded, foreign: Foreign, state: TrainingState | JointState, optimizer: bool) -> Loaded:
    """Adds what was not restored of another program's checkpoint. Sets its learning rates if the optimizer was."""
    notes = (*loaded.notes, *foreign.notes)
    if foreign.run is None:
        return replace(loaded, notes=(*notes, "it has only weights; optimizer, schedule and counters are unchanged"))
    has_schedule = isinstance(state, TrainingState) and state.scheduler is not None
    if foreign.run.scheduler is None and has_schedule:
        steps = foreign.steps_applied
        notes += (f"the checkpoint has no schedule: the job's schedule continues after {steps} steps",)
    # After the schedule, whose state does not set them: torch's schedules calculate the next rate from the current one.
    if optimizer and isinstance(state, TrainingState):
        state.load_rates(foreign.run.rates)
    return replace(loaded, notes=notes)
