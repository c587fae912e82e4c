"""Loading what was committed, or what another program saved, into an engine: all ranks together.

Nothing of the engine is overwritten before the checkpoint is known to be whole in its sizes, and to hold this model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
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
from dsjob.checkpoint.live.state import TrainingState
from dsjob.checkpoint.other.elsewhere import find_elsewhere
from dsjob.checkpoint.other.foreign import Foreign
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.run_state import read_job, read_values, restoring
from dsjob.checkpoint.root.source import locate, open_root, renamed
from dsjob.errors import CheckpointError
from dsjob.ranks.agreement import on_all_ranks, on_rank_0
from dsjob.ranks.mesh import World
from dsjob.ranks.seeding import seed_rng

T = TypeVar("T")


Take = Callable[[dict[str, Tensor]], None]  # what a program does with weights by name, whole, on the CPU


def _make_tensors(checkpoint: layout.Checkpoint, roles: Sequence[str]) -> dict[str, Tensor]:
    """Tensors to read those of `roles` into, whole, on the CPU."""
    found = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.role in roles}
    return {name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]) for name, tensor in found.items()}


@dataclass(frozen=True)
class Opened:
    """A checkpoint to be read: its root, folder and plain values; `foreign` where another program saved it."""

    root: layout.Folder
    checkpoint: layout.Checkpoint
    url: str
    values: dict[str, Any]
    foreign: Foreign | None = None


class Loader:
    """Loads from the checkpoints below one URL, whatever the world size that saved them. A collective, each method."""

    def __init__(self, url: str, world: World, catalog: Catalog, objects: Kept) -> None:
        self._url, self._catalog, self._objects = url, catalog, objects
        self._everyone, self._data_rank, self._model = world.everyone, world.data_rank, world.model

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
        state = view_state(engine, self._model)
        foreign = on_rank_0(self._everyone, lambda: self._find_foreign(state, tag))
        if foreign is None:
            opened = self._open(tag)
        else:
            optimizer, scheduler = optimizer and foreign.run is not None, scheduler and foreign.run is not None
            values = foreign.values(state.optimizer_values() if optimizer else {})
            opened = Opened(foreign.open(), foreign.checkpoint, foreign.place, values, foreign)
        checkpoint, url, values = opened.checkpoint, opened.url, opened.values
        ours = state.model_tensors()
        if take is None:
            found = self._match(ours, checkpoint, url)
            hint = "load it into the model that it was saved from, or train in another output.dir"
            require_match(found, ours, checkpoint, strict=strict, hint=hint)
            weights = {name: ours[name] for name in found.taken}
        else:
            # The program takes whole tensors; nothing is matched, because it may map names as it likes.
            weights = _make_tensors(checkpoint, layout.ROLES)
        saved = {n: (t.shape, DTYPES[t.dtype]) for n, t in checkpoint.tensors.items() if t.role == "optimizer"}
        job = on_all_ranks(self._everyone, lambda: read_job(opened.root, checkpoint)) if foreign is None else None
        kept = _make_tensors(checkpoint, (CLIENT,))
        client_state = self._restore(url, lambda: decode(values.get("client_state", {}), stored=kept))
        # Everything is matched and allocated before the first byte is read: from here on the engine changes.
        tensors = self._restore(url, lambda: state.make_optimizer_tensors(saved) if optimizer else {})
        self._read(opened, {**weights, **tensors, **kept})
        if take is not None:
            weights.update({name: weights[first] for name, first in checkpoint.aliases.items()})
            take({name.removeprefix("model."): weight for name, weight in weights.items()})
        # Generators belong to a rank. On another number of ranks they begin anew, from a seed that depends on the step.
        same_world = len(values.get("rng", {})) == self._everyone.size
        objects = values.get("objects", {})
        told = self._restore(url, lambda: restore_objects(self._everyone, self._objects, objects))

        def put_back() -> None:
            if optimizer:
                state.load_optimizer(tensors, values["optimizer"])
                state.load_scaler(values.get("loss_scaler"))  # absent before there was fp16
            if scheduler:
                state.load_scheduler(values["scheduler"], rates=optimizer)
            if same_world:
                restore_rng(values["rng"][str(self._everyone.rank)], state.device)
            else:
                seed_rng(seed + 1_000_003 * checkpoint.step + self._data_rank)

        self._restore(url, put_back)
        with restoring(url):
            engine.restore_counters(values.get("counters", engine.counters()))  # a collective: ranks gather weights
        exact = same_world and optimizer and scheduler
        notes = told + (describe_left_out(saved, tensors) if optimizer else ())
        notes += foreign.notes if foreign is not None else ()
        return Loaded(checkpoint.tag, url, checkpoint.step, client_state, exact, job, notes)

    def load_weights(self, engine: Savable, source: str, *, strict: bool) -> Matched:
        """See Checkpointer.load_weights."""

        def find() -> tuple[str, dict[str, Any]]:
            with renamed(f"read {source}"):
                root, record = locate(source, None)
                return root.root, record

        url, record = on_rank_0(self._everyone, find)
        root = open_root(url)
        checkpoint = on_all_ranks(self._everyone, lambda: read_checkpoint(root, record))
        opened = Opened(root, checkpoint, storage.join(url, checkpoint.folder), {})
        ours = view_state(engine, self._model).model_tensors()
        found = self._match(ours, checkpoint, opened.url)
        if strict or not found.taken:
            hint = "checkpoint.strict=false takes what matches" if found.taken else "none of its weights is the model's"
            require_match(found, ours, checkpoint, strict=True, hint=hint)
        on_rank_0(self._everyone, lambda: require_sizes(opened.url, checkpoint))
        self._read(opened, {name: ours[name] for name in found.taken})
        engine.restore_counters(engine.counters())  # compute copies follow the masters
        return found

    def _open(self, tag: str | None) -> Opened:
        """A checkpoint of dsjob's, the newest where no tag is given."""
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
            raise CheckpointError(f"{self._url} holds one whole model of {found.program}, and there are several here")
        return found

    def _match(self, ours: Mapping[str, Tensor], checkpoint: layout.Checkpoint, url: str) -> Matched:
        """See `match`. Raises CheckpointError where the checkpoint is of another number of model-parallel ranks."""
        saved = checkpoint.manifest.get("model_ranks", 1)
        if saved != self._model.size:
            raise CheckpointError(
                f"{url} holds the parts of {saved} model-parallel rank{'s' * (saved > 1)}, and there are"
                f" {self._model.size} now",
                hint="load it with as many; `dsjob convert --model mp_rank_00` gives the weights of a part",
            )
        start = f"model.{name_part(self._model.rank)}." if saved > 1 else "model."
        return match(ours, checkpoint, url, start)

    def _read(self, opened: Opened, tensors: dict[str, Tensor]) -> None:
        """Fills tensors, each rank its own boxes of them."""
        reader = ShardReader(opened.root, opened.checkpoint)
        with renamed(f"read {opened.url}"):
            run_dcp(lambda **how: dcp.load(tensors, storage_reader=reader, **how))

    def _restore(self, url: str, action: Callable[[], T]) -> T:
        """Does, on every rank or on none, what puts values back and is no collective."""

        def act() -> T:
            with restoring(url):
                return action()

        return on_all_ranks(self._everyone, act)
