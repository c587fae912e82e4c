"""Saving and loading an engine, all ranks together.

Order of a save: shards and completion records, state, manifest, commit record, `latest`, then retention. Nothing
counts as saved before its commit record is durable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as layout
from dsjob.checkpoint.catalog import Catalog, encode_json
from dsjob.checkpoint.elsewhere import find_elsewhere
from dsjob.checkpoint.foreign import Foreign
from dsjob.checkpoint.joint import JointState, name_part
from dsjob.checkpoint.rng import capture_rng, restore_rng
from dsjob.checkpoint.shards import DTYPES, ShardReader, ShardWriter
from dsjob.checkpoint.source import open_root, renamed
from dsjob.checkpoint.state import BY_RANK, Shapes, TrainingState
from dsjob.checkpoint.values import decode, encode
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError
from dsjob.mesh import World
from dsjob.seeding import seed_rng

T = TypeVar("T")


class Savable(Protocol):
    """What can be saved: an engine, or several."""

    def state(self) -> TrainingState | JointState: ...
    def counters(self) -> dict[str, int]: ...
    def restore_counters(self, counters: Mapping[str, int]) -> None: ...
    def zero_optimization_stage(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed: its folder, bytes of tensors, and seconds that saving took."""

    tag: str
    url: str
    size: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded; `job`: the resolved document that it carries.

    `exact`: the run goes on bit for bit (same world size, all state restored). `notes`: what else begins anew.
    """

    tag: str
    url: str
    step: int
    client_state: dict[str, Any]
    exact: bool
    job: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


class Checkpointer:
    """The checkpoints below one URL. Every rank calls each method; rank 0 does what is done once.

    Model-parallel ranks have a part of the model each, with names and values of its own: see `joint`.
    """

    def __init__(self, url: str, *, world: World, keep: int, job: Mapping[str, Any] | None = None) -> None:
        self.url, self._keep, self._job = url, keep, job
        self._world, self._data_rank, self._model = world.everyone, world.rank, world.model
        self._catalog = Catalog(url)
        self._attempt = 0

    def newest(self) -> str | None:
        """The tag of the newest committed checkpoint, as rank 0 sees it."""
        return self._on_rank_0(self._catalog.newest)

    def set_aside(self, *, newer_than: int) -> None:
        """See Catalog.set_aside."""
        self._on_rank_0(lambda: self._catalog.set_aside(newer_than))

    def save(
        self,
        engine: Savable,
        *,
        tag: str,
        client_state: Mapping[str, Any] | None = None,
        latest: bool = True,
        replace: bool = False,
        frozen: bool = True,
    ) -> Saved:
        """Saves and commits; `replace`: also where the tag is taken; `frozen`: with parameters that are not trained.

        Every rank gets CheckpointError or StorageError; older saves stay whole.
        """
        started = time.monotonic()
        if not layout.NAME.fullmatch(tag):
            raise CheckpointError(f"{tag!r} is no name for a checkpoint", hint="letters, digits, '.', '_' and '-'")
        self._attempt = self._attempt or self._on_rank_0(self._catalog.next_attempt)
        folder = f"{tag}-a{self._attempt:04d}"
        state = self._view(engine) if frozen else self._view(engine).without_frozen()
        tensors = {**state.model_tensors(), **state.optimizer_tensors()}
        plain = self._collect_plain(state, tensors)
        writer = ShardWriter(storage.join(self.url, folder), plain["roles"].__getitem__)
        try:
            _run_dcp(lambda **how: dcp.save(tensors, storage_writer=writer, planner=_plan_saves(), **how))
            self._on_rank_0(
                lambda: self._catalog.commit(
                    folder,
                    self._describe(engine, writer, tag, folder, plain, client_state),
                    self._attempt,
                    latest=latest,
                    replace=replace,
                )
            )
        except DsjobError:
            self._on_rank_0(lambda: self._catalog.discard(tag, folder))
            raise
        self._on_rank_0(lambda: self._catalog.retire(self._keep))
        size = sum(entry["size"] for entry in writer.files.values())
        return Saved(tag, storage.join(self.url, folder), size, time.monotonic() - started)

    def _view(self, engine: Savable) -> TrainingState | JointState:
        """The state of an engine; on model-parallel ranks by the name of this one's part."""
        state = engine.state()
        return JointState({name_part(self._model.rank): state}) if self._model.size > 1 else state

    def _collect_plain(self, state: TrainingState | JointState, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """What is no tensor, of this rank's state and the parts of others; `rng`: the generators, by rank."""
        own: dict[str, Any] = {
            "optimizer": state.optimizer_values(),
            "scheduler": state.scheduler_values(),
            "loss_scaler": state.scaler_values(),
            "aliases": dict(state.aliases),
            "pretrained": state.pretrained,
            "roles": {name: state.role(name) for name in tensors},
            "models": state.names if isinstance(state, JointState) else [],
        }
        ranks: list[Any] = [(capture_rng(state.device), own)]
        if self._world.world_size > 1:
            sent = ranks[0][0], own if self._model.size > 1 and self._data_rank == 0 else None
            ranks = [None] * self._world.world_size
            dist.all_gather_object(ranks, sent)
        parts = [part for _, part in ranks if part is not None]
        if self._model.size > 1:
            models = sorted(name for part in parts for name in part.pop("models"))
            own = {key: {name: value for part in parts for name, value in part[key].items()} for key in parts[0]}
            own["models"] = models
        return {**own, "rng": {str(rank): entry for rank, (entry, _) in enumerate(ranks)}}

    def _describe(
        self,
        engine: Savable,
        writer: ShardWriter,
        tag: str,
        folder: str,
        plain: Mapping[str, Any],
        client_state: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Writes what lies beside the shards; returns the manifest."""
        values = {
            "counters": engine.counters(),
            **{key: plain[key] for key in ("optimizer", "scheduler", "loss_scaler", "rng")},
            "client_state": encode(dict(client_state or {}), "client_state"),
        }
        root = storage.join(self.url, folder)
        for rank in range(self._world.world_size):
            if not storage.exists(storage.join(root, "done", f"r{rank:05d}.json")):
                raise CheckpointError(f"{root} has no completion record of rank {rank}")
        text = encode_json(values)
        storage.write_bytes(storage.join(root, "state.json"), text)
        if self._job is not None:
            storage.write_bytes(storage.join(root, "job.json"), encode_json(self._job))
        return {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "tag": tag,
            "step": engine.counters()["global_steps"],
            "world_size": self._world.world_size,
            "zero_stage": engine.zero_optimization_stage(),
            "files": writer.files,
            "tensors": writer.tensors,
            "aliases": {f"model.{name}": f"model.{target}" for name, target in plain["aliases"].items()},
            **({"models": plain["models"]} if plain["models"] else {}),
            **({"model_ranks": self._model.size} if self._model.size > 1 else {}),
            **({"pretrained": plain["pretrained"]} if plain["pretrained"] else {}),
            "state_sha256": hashlib.sha256(text).hexdigest(),
        }

    def load(
        self,
        engine: Savable,
        *,
        tag: str | None = None,
        strict: bool = True,
        optimizer: bool = True,
        scheduler: bool = True,
        seed: int = 0,
    ) -> Loaded:
        """Loads a committed checkpoint (the newest where no tag is given) into the engine, whatever its world size.

        What another program saved there (see `elsewhere`) is loaded too: a run goes on, or weights alone are taken.
        `strict`: every parameter and buffer of the model has to be in it, and the other way round. `seed`: what random
        generators are re-seeded from where the world size is another one. Raises NoCheckpointError,
        CorruptCheckpointError, CheckpointError.
        """
        state = self._view(engine)
        foreign = self._on_rank_0(lambda: self._find_foreign(state, tag))
        if foreign is None:
            record = self._on_rank_0(lambda: self._catalog.find(tag))
            root = open_root(self.url)
            with renamed(f"read {self.url}"):
                checkpoint = layout.read_checkpoint(root, record)
            url = storage.join(self.url, checkpoint.folder)
            values = _read_values(url, checkpoint)
        else:
            root, checkpoint, url = foreign.open(), foreign.checkpoint, foreign.place
            optimizer, scheduler = optimizer and foreign.run is not None, scheduler and foreign.run is not None
            values = foreign.values(state.optimizer_values() if optimizer else {})
        tensors = self._match(state.model_tensors(), checkpoint, url, strict)
        saved = {n: (t.shape, DTYPES[t.dtype]) for n, t in checkpoint.tensors.items() if t.role == "optimizer"}
        optimizer_tensors = state.make_optimizer_tensors(saved) if optimizer else {}
        reader = ShardReader(root, checkpoint)
        with renamed(f"read {url}"):
            _run_dcp(lambda **how: dcp.load({**tensors, **optimizer_tensors}, storage_reader=reader, **how))
        if optimizer:
            state.load_optimizer(optimizer_tensors, values["optimizer"])
            state.load_scaler(values.get("loss_scaler"))  # absent before there was fp16
        if scheduler:
            state.load_scheduler(values["scheduler"])
        engine.restore_counters(values.get("counters", engine.counters()))
        same_world = len(values.get("rng", {})) == self._world.world_size
        if same_world:
            restore_rng(values["rng"][str(self._world.rank)], state.device)
        else:
            seed_rng(seed + 1_000_003 * checkpoint.step + self._data_rank)
        exact = same_world and optimizer and scheduler
        job_url = storage.join(url, "job.json")
        job = json.loads(storage.read_bytes(job_url)) if storage.exists(job_url) else None
        notes = _describe_left_out(saved, optimizer_tensors) if optimizer else ()
        notes += foreign.notes if foreign is not None else ()
        return Loaded(checkpoint.tag, url, checkpoint.step, decode(values.get("client_state", {})), exact, job, notes)

    def _find_foreign(self, state: TrainingState | JointState, tag: str | None) -> Foreign | None:
        joint = isinstance(state, JointState)
        groups = None if joint else [group["names"] for group in state.optimizer_values().get("groups", [])]
        with renamed(f"read {self.url}"):
            found = find_elsewhere(self.url, tag, groups)
        if found is not None and joint:
            raise CheckpointError(f"{self.url} holds one whole model of {found.program}, and there are several here")
        return found

    def _match(
        self, ours: dict[str, torch.Tensor], checkpoint: layout.Checkpoint, url: str, strict: bool
    ) -> dict[str, torch.Tensor]:
        saved = checkpoint.manifest.get("model_ranks", 1)
        if saved != self._model.size:
            raise CheckpointError(
                f"{url} holds the parts of {saved} model-parallel rank{'s' * (saved > 1)}, and there are"
                f" {self._model.size} now",
                hint="load it with as many; `dsjob convert --model mp_rank_00` gives the weights of a part",
            )
        start = f"model.{name_part(self._model.rank)}." if saved > 1 else "model."
        return _match(ours, checkpoint, url, strict, start)

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and gives its result, or raises its error, on every rank."""
        if self._world.world_size == 1:
            return action()
        answer: list[Any] = [None, None]
        if self._world.rank == 0:
            try:
                answer[0] = action()
            except DsjobError as error:
                answer[1] = error
            except Exception as error:  # the other ranks are waiting: they have to hear of it
                answer[1] = CheckpointError(f"rank 0: {type(error).__name__}: {error}")
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return cast(T, answer[0])


def _describe_left_out(saved: Shapes, loaded: Mapping[str, Any]) -> tuple[str, ...]:
    left_out = [name for name in saved if name.endswith(BY_RANK) and name not in loaded]
    gone = sorted({name.rpartition(".")[2].removesuffix(BY_RANK) for name in left_out})
    return (f"the optimizer's {', '.join(gone)} begin anew: they belong to another number of ranks",) if gone else ()


def _read_values(url: str, checkpoint: layout.Checkpoint) -> dict[str, Any]:
    text = storage.read_bytes(storage.join(url, "state.json"))
    if hashlib.sha256(text).hexdigest() != checkpoint.manifest.get("state_sha256"):
        raise CorruptCheckpointError(f"{url}/state.json differs from the sha256 in the manifest")
    values: dict[str, Any] = json.loads(text)
    return values


def _match(
    ours: dict[str, torch.Tensor], checkpoint: layout.Checkpoint, url: str, strict: bool, start: str
) -> dict[str, torch.Tensor]:
    """The model's tensors that the checkpoint has. Raises CheckpointError where it is another model's.

    `start`: of the names of those that belong to this rank.
    """
    theirs = {n: t.shape for n, t in checkpoint.tensors.items() if t.role != "optimizer" and n.startswith(start)}
    missing, extra = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    shapes = [name for name in ours if name in theirs and tuple(ours[name].shape) != theirs[name]]
    lines = [f"not in the checkpoint: {_list(missing)}"] if missing and strict else []
    lines += [f"not in the model: {_list(extra)}"] if extra and strict else []
    lines += [f"{n} is {list(ours[n].shape)} in the model, {list(theirs[n])} in the checkpoint" for n in shapes[:3]]
    if lines:
        hint = "load it into the model that it was saved from, or train in another output.dir"
        raise CheckpointError(f"{url} holds another model: {'; '.join(lines)}", hint=hint)
    return {name: tensor for name, tensor in ours.items() if name in theirs}


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plan_saves() -> dcp.DefaultSavePlanner:
    # Replicated tensors are rank 0's: where ranks differ (buffers of batch norm), it is rank 0's that are kept.
    return dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)


def _run_dcp(call: Callable[..., Any]) -> None:
    """Runs a save or load of DCP; what one rank raised is raised on all, as itself."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that one process is one process
            call(no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, (DsjobError, layout.Problem)):
            raise cause from None
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause
