"""Saving, finding and loading checkpoints: the commit protocol, retention and resume.

Order of a save: shards and completion records, state and manifest, the commit record (created exclusively), `latest`,
then retention. Nothing counts as saved before its commit record is durable, and a folder without one does not exist.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
import warnings
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as layout
from dsjob.checkpoint.rng import capture_rng, restore_rng, seed_rng
from dsjob.checkpoint.shards import DTYPES, ShardReader, ShardWriter
from dsjob.checkpoint.source import UrlFolder, renamed
from dsjob.checkpoint.state import TrainingState
from dsjob.checkpoint.values import decode, encode
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError
from dsjob.mesh import World

if TYPE_CHECKING:
    from typing import Protocol

    class Savable(Protocol):
        """What can be saved: an engine."""

        def state(self) -> TrainingState: ...
        def counters(self) -> dict[str, int]: ...
        def restore_counters(self, counters: Mapping[str, int]) -> None: ...
        def zero_optimization_stage(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed: its folder, bytes on disk, and seconds that saving took."""

    tag: str
    url: str
    size: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded. `exact`: the run goes on bit for bit (same world size, all state restored)."""

    tag: str
    url: str
    step: int
    samples: int
    client_state: dict[str, Any]
    exact: bool


class Checkpointer:
    """The checkpoints below one URL. All ranks call the same methods; rank 0 does what is done once."""

    def __init__(self, url: str, *, world: World, keep: int, job: Mapping[str, Any] | None = None) -> None:
        self.url, self._world, self._keep, self._job = url, world, keep, job
        self._source = UrlFolder(url)
        self._attempt: int | None = None

    def newest(self) -> str | None:
        """The tag of the newest committed checkpoint, as rank 0 sees it."""
        return self._on_rank_0(self._find_newest)  # type: ignore[no-any-return]

    def _find_newest(self) -> str | None:
        with renamed():
            try:
                return str(layout.find_commit(self._source)["tag"])
            except layout.NothingThere:
                return None

    def save(
        self,
        engine: Savable,
        *,
        tag: str,
        client_state: Mapping[str, Any] | None = None,
        latest: bool = True,
    ) -> Saved:
        """Saves and commits. Every rank gets CheckpointError or StorageError; older saves stay whole."""
        started = time.monotonic()
        if not layout.NAME.fullmatch(tag):
            raise CheckpointError(f"{tag!r} is no name for a checkpoint", hint="letters, digits, '.', '_' and '-'")
        if self._attempt is None:
            self._attempt = self._on_rank_0(self._next_attempt)
        folder = f"{tag}-a{self._attempt:04d}"
        state = engine.state()
        values = self._values(engine, state, client_state)
        writer = ShardWriter(storage.join(self.url, folder), state.role)
        tensors = {**state.model_tensors(), **state.optimizer_tensors()}
        try:
            _run_dcp(lambda **how: dcp.save(tensors, storage_writer=writer, planner=_save_planner(), **how))
            size = self._on_rank_0(lambda: self._commit(engine, state, writer, tag, folder, values, latest))
        except DsjobError:
            self._on_rank_0(lambda: self._discard(folder))
            raise
        self._on_rank_0(self._retire)
        return Saved(tag, storage.join(self.url, folder), size, time.monotonic() - started)

    def _values(self, engine: Savable, state: TrainingState, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        own = capture_rng(state.device)
        ranks: list[Any] = [None] * self._world.world_size
        if self._world.world_size > 1:
            dist.all_gather_object(ranks, own)
        else:
            ranks = [own]
        return {
            "counters": engine.counters(),
            "optimizer": state.optimizer_values(),
            "scheduler": state.scheduler_values(),
            "rng": {str(rank): entry for rank, entry in enumerate(ranks)},
            "client_state": encode(dict(client_state or {}), "client_state"),
        }

    def _next_attempt(self) -> int:
        numbers = [int(found[1]) for name in storage.list_names(self.url) if (found := re.search(r"-a(\d{4,})$", name))]
        return max(numbers, default=0) + 1

    def _commit(
        self,
        engine: Savable,
        state: TrainingState,
        writer: ShardWriter,
        tag: str,
        folder: str,
        values: dict[str, Any],
        latest: bool,
    ) -> int:
        step = engine.counters()["global_steps"]
        root = storage.join(self.url, folder)
        for rank in range(self._world.world_size):
            if not storage.exists(storage.join(root, "done", f"r{rank:05d}.json")):
                raise CheckpointError(f"{root} has no completion record of rank {rank}")
        storage.write_bytes(storage.join(root, "state.json"), _json(values))
        if self._job is not None:
            storage.write_bytes(storage.join(root, "job.json"), _json(self._job))
        aliases = {f"model.{name}": f"model.{target}" for name, target in state.aliases.items()}
        manifest = _json({
            "format": layout.FORMAT, "version": layout.VERSION, "tag": tag, "step": step,
            "world_size": self._world.world_size, "zero_stage": engine.zero_optimization_stage(),
            "files": writer.files, "tensors": writer.tensors, "aliases": aliases,
            "state_sha256": hashlib.sha256(_json(values)).hexdigest(),
        })  # fmt: skip
        storage.write_bytes(storage.join(root, "manifest.json"), manifest)
        record = {
            "format": layout.FORMAT, "version": layout.VERSION, "tag": tag, "step": step, "attempt": self._attempt,
            "dir": folder, "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        }  # fmt: skip
        storage.make_folder(storage.join(self.url, "commits"))
        try:
            storage.create_bytes(storage.join(self.url, "commits", f"{tag}.json"), _json(record))
        except FileExistsError:
            raise CheckpointError(
                f"{self.url} holds a checkpoint {tag} of another run", hint="save to another folder: checkpoint.dir=..."
            ) from None
        self._write_hints(tag if latest else None)
        return sum(entry["size"] for entry in writer.files.values())

    def _write_hints(self, tag: str | None) -> None:
        if tag is not None:
            storage.write_bytes(storage.join(self.url, "latest"), f"{tag}\n".encode())
        script = resources.files("dsjob.checkpoint").joinpath("zero_to_fp32.py").read_bytes()
        url = storage.join(self.url, "zero_to_fp32.py")
        if not storage.exists(url):
            storage.write_bytes(url, script)

    def _discard(self, folder: str) -> None:
        """Deletes what a failed save left, so that a full disk has its space back; never what was committed."""
        committed = storage.exists(storage.join(self.url, "commits", f"{folder.rpartition('-a')[0]}.json"))
        if not committed:
            storage.delete(storage.join(self.url, folder))

    def _retire(self) -> None:
        """Deletes all but the newest `keep` checkpoints, the commit record first."""
        if self._keep == 0:
            return
        for record in self._records()[: -self._keep]:
            storage.delete(storage.join(self.url, "commits", f"{record['tag']}.json"))
            storage.delete(storage.join(self.url, record["dir"]))

    def set_aside(self, *, newer_than: int) -> None:
        """Moves the commit records of later steps out of the way of a run that goes back; their folders stay."""
        self._on_rank_0(lambda: self._set_aside(newer_than))

    def _set_aside(self, step: int) -> None:
        for record in self._records():
            if record["step"] > step:
                name = f"{record['tag']}.json"
                text = storage.read_bytes(storage.join(self.url, "commits", name))
                storage.make_folder(storage.join(self.url, "superseded"))
                storage.write_bytes(storage.join(self.url, "superseded", f"{record['dir']}.json"), text)
                storage.delete(storage.join(self.url, "commits", name))

    def _records(self) -> list[dict[str, Any]]:
        """All commit records, in the order of their steps."""
        tags = [name[:-5] for name in storage.list_names(storage.join(self.url, "commits")) if name.endswith(".json")]
        with renamed():
            return sorted(
                (layout.read_commit(self._source, tag) for tag in tags), key=lambda record: int(record["step"])
            )

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

        `strict`: every parameter and buffer of the model has to be in it, and the other way round. `seed`: what random
        generators are re-seeded from where the world size is another one. Raises NoCheckpointError,
        CorruptCheckpointError, CheckpointError.
        """
        with renamed():
            record = self._on_rank_0(lambda: layout.find_commit(self._source, tag))
            checkpoint = layout.read_checkpoint(self._source, record)
        url = storage.join(self.url, checkpoint.folder)
        values = self._read_values(url, checkpoint)
        state = engine.state()
        tensors = self._match(state.model_tensors(), checkpoint, url, strict)
        saved = {n: (t.shape, DTYPES[t.dtype]) for n, t in checkpoint.tensors.items() if t.role == "optimizer"}
        optimizer_tensors = state.make_optimizer_tensors(saved) if optimizer and state.optimizer is not None else {}
        reader = ShardReader(self._source, checkpoint)
        with renamed():
            _run_dcp(lambda **how: dcp.load({**tensors, **optimizer_tensors}, storage_reader=reader, **how))
        if optimizer:
            state.load_optimizer(optimizer_tensors, values["optimizer"])
        if scheduler:
            state.load_scheduler(values["scheduler"])
        engine.restore_counters(values["counters"])
        same_world = len(values["rng"]) == self._world.world_size
        if same_world:
            restore_rng(values["rng"][str(self._world.rank)], state.device)
        else:
            seed_rng(seed + 1_000_003 * checkpoint.step + self._world.rank)
        client_state = decode(values["client_state"])
        samples = int(values["counters"]["global_samples"])
        exact = same_world and optimizer and scheduler
        return Loaded(checkpoint.tag, url, checkpoint.step, samples, client_state, exact)

    def _read_values(self, url: str, checkpoint: layout.Checkpoint) -> dict[str, Any]:
        text = storage.read_bytes(storage.join(url, "state.json"))
        if hashlib.sha256(text).hexdigest() != checkpoint.manifest.get("state_sha256"):
            raise CorruptCheckpointError(f"{url}/state.json differs from the sha256 in the manifest")
        values: dict[str, Any] = json.loads(text)
        return values

    @staticmethod
    def _match(
        ours: dict[str, torch.Tensor], checkpoint: layout.Checkpoint, url: str, strict: bool
    ) -> dict[str, torch.Tensor]:
        theirs = {name: t.shape for name, t in checkpoint.tensors.items() if t.role != "optimizer"}
        missing, extra = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        shapes = [name for name in ours if name in theirs and tuple(ours[name].shape) != theirs[name]]
        lines = [f"not in the checkpoint: {_list(missing)}"] if missing and strict else []
        lines += [f"not in the model: {_list(extra)}"] if extra and strict else []
        lines += [f"{n} is {list(ours[n].shape)} in the model, {list(theirs[n])} in the checkpoint" for n in shapes[:5]]
        if lines:
            raise CheckpointError(
                f"{url} holds another model: " + "; ".join(lines), hint="load it into the model that it was saved from"
            )
        return {name: tensor for name, tensor in ours.items() if name in theirs}

    def _on_rank_0(self, action: Any) -> Any:
        """Runs `action` on rank 0 and gives its result, or raises its error, on every rank."""
        if self._world.world_size == 1:
            return action()
        answer: list[Any] = [None, None]
        if self._world.rank == 0:
            try:
                answer[0] = action()
            except (DsjobError, layout.Problem) as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]


def _save_planner() -> dcp.DefaultSavePlanner:
    # Replicated tensors are rank 0's: where ranks differ (buffers of batch norm), it is rank 0's that are kept.
    return dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)


def _run_dcp(call: Any) -> None:
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


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
