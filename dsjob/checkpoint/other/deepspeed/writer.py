"""Writes one of dsjob's checkpoints as DeepSpeed would have saved it, with ZeRO 1 to 3 at a chosen world size.

DeepSpeed only loads files of torch.save, which are pickles. (dsjob reads such files only through `torch_files`.) They
contain plain containers and tensors, and the loss scaler and addresses under the names of DeepSpeed's classes, which
need not be installed. Flat tensors are memory-mapped files while they are filled, so memory use is a few buffers, but
the disk needs room for the state twice.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.dtypes import DTYPES
from dsjob.checkpoint.format.values import CLIENT, decode
from dsjob.checkpoint.format.zero_to_fp32 import AVERAGE
from dsjob.checkpoint.other.deepspeed.layout import Piece, place_in_order, place_stage3
from dsjob.checkpoint.other.deepspeed.named_pickle import save_named
from dsjob.checkpoint.other.torch_files import DynamicLossScaler, FragmentAddress, LossScaler
from dsjob.errors import StorageError, UsageError

VERSION = "0.19.6"  # the version of DeepSpeed whose format this is
SUB_GROUP = 10**9  # the default of stage 3's sub_group_size: elements per rank that are stepped together
ADAM = ("Adam", "AdamW", "DeepSpeedAdam", "FusedAdam", "DeepSpeedCPUAdam")


@dataclass(frozen=True)
class Target:
    """What to write. `dtype`: of the model's own weights; the run that continues must use the same."""

    stage: int
    world_size: int
    dtype: torch.dtype

    @property
    def prefix(self) -> str:
        """The prefix of the names of optimizer files."""
        return "bf16_" if self.dtype == torch.bfloat16 else ""


def write_deepspeed(
    source: layout.Folder,
    checkpoint: layout.Checkpoint,
    values: Mapping[str, Any],
    out: str,
    target: Target,
    overwrite: bool = False,
) -> list[str]:
    """Writes `out`/global_step<n> and `out`/latest. Returns the paths of the files. values: the content of state.json.

    Raises UsageError if the checkpoint has no optimizer state, or the output exists.
    """
    tag = f"global_step{values['counters']['global_steps']}"
    if not values["optimizer"]:
        raise UsageError(
            "the checkpoint has no optimizer state, which DeepSpeed's format requires", hint="use --to fp32"
        )
    if os.path.exists(os.path.join(out, tag)) and not overwrite:
        raise UsageError(
            f"{out} already has a checkpoint {tag}",
            hint="choose another output, or set --overwrite (Python: overwrite=True)",
        )
    os.makedirs(out, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{tag}.", dir=out) as scratch:
        shards = layout.Shards(source, checkpoint)
        os.mkdir(os.path.join(scratch, "files"))
        try:
            mapped = _Mapped(shards, scratch)
            stored = {name: mapped.read(name) for name, tensor in mapped.tensors.items() if tensor.role == CLIENT}
            writer = _Writer(mapped, checkpoint.aliases, decode(values, stored=stored), target)
            names = writer.write(os.path.join(scratch, "files"))
        finally:
            shards.close()
        place = os.path.join(out, tag)
        if os.path.exists(place):
            os.replace(place, os.path.join(scratch, "before"))  # deleted with `scratch`, once the new one is in place
        os.replace(os.path.join(scratch, "files"), place)
    storage.write_bytes(os.path.join(out, "latest"), tag.encode())
    return [os.path.join(out, tag, name) for name in names]


class _Mapped:
    """Reads tensors of a checkpoint into memory-mapped files, and creates new ones."""

    def __init__(self, shards: layout.Shards, scratch: str) -> None:
        self.tensors = shards.checkpoint.tensors
        self._shards, self._scratch, self._numbers = shards, scratch, itertools.count()

    def make(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros, mapped to a file of its own."""
        if not count:
            return torch.zeros(0, dtype=dtype)
        path = f"{self._scratch}/{next(self._numbers)}"
        try:
            # Allocate the blocks now: writing to a mapped file on a full disk would kill the process with SIGBUS.
            with open(path, "wb") as file:
                os.truncate(path, count * dtype.itemsize)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}") from error
        return torch.from_file(path, shared=True, size=count, dtype=dtype)

    def spread(self, full: str, pieces: Iterable[Piece], ranks: Sequence[Tensor]) -> None:
        """Streams a tensor into its pieces in the flat tensors of the ranks."""
        waiting, done = list(pieces), 0
        for block in self._shards.stream(full):
            values = _view(block, self.tensors[full].dtype)
            for piece in waiting:
                low, high = max(piece.at, done), min(piece.at + piece.length, done + values.numel())
                if low < high:
                    start = piece.start + low - piece.at
                    ranks[piece.rank][start : start + high - low] = values[low - done : high - done]
            done += values.numel()

    def read(self, full: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor, memory-mapped; floating-point ones as `dtype`, if given."""
        entry = self.tensors[full]
        own = DTYPES[entry.dtype]
        flat = self.make(math.prod(entry.shape), dtype if dtype is not None and own.is_floating_point else own)
        done = 0
        for block in self._shards.stream(full):
            values = _view(block, entry.dtype)
            flat[done : done + values.numel()] = values
            done += values.numel()
        return flat.reshape(entry.shape)

    def read_number(self, full: str) -> int:
        """A tensor with one element, of any dtype, as an integer."""
        data = bytearray(b"".join(map(bytes, self._shards.stream(full))))
        return int(_view(memoryview(data), self.tensors[full].dtype))


class _Writer:
    """Fills the flat tensors in one pass over the shards, then saves file by file."""

    def __init__(self, mapped: _Mapped, aliases: Mapping[str, str], values: Mapping[str, Any], target: Target) -> None:
        self.mapped, self.values, self.target, self.tensors = mapped, values, target, mapped.tensors
        self.aliases = {alias.removeprefix("model."): name.removeprefix("model.") for alias, name in aliases.items()}
        self.settings = values["optimizer"]["groups"]
        self.groups = self._split_groups()
        self.trained = [name for group in self.groups for name in group]
        weights = [n.removeprefix("model.") for n, t in self.tensors.items() if t.role in ("parameter", "frozen")]
        self.frozen = sorted(set(weights) - set(self.trained))

    def write(self, folder: str) -> list[str]:
        """Writes all files. Returns their names."""
        weights = self._fill("model.{}", torch.float32)
        kept = {key: self._fill(f"optimizer.{{}}.{key}", torch.float32) for key in self._list_keys()}
        main, target = self._describe_model(), self.target
        written = []
        fragments = self._cut_frozen()
        for rank in range(target.world_size if target.stage == 3 else 1):
            own = {**main, "frozen_param_fragments": fragments[rank]} if fragments else main
            name = "mp_rank_00_model_states.pt"
            written.append(f"zero_pp_rank_{rank}_{name}" if target.stage == 3 else name)
            save_named(own if rank == 0 else {**own, "shared_params": {}}, os.path.join(folder, written[-1]))
        for rank in range(target.world_size):
            inner = self._describe_optimizer(rank, weights, kept)
            written.append(f"{target.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            whole = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": VERSION}
            save_named(whole, os.path.join(folder, written[-1]))
        return written

    def _split_groups(self) -> list[list[str]]:
        """The trained parameters by group; at stage 3 by sub-group, as in stage3's `_create_fp16_sub_groups`."""
        groups = [list(group["names"]) for group in self.settings]
        if self.target.stage != 3:
            return groups
        found: list[list[str]] = []
        for group in groups:
            sub: list[str] = []
            held = 0
            for name in group:
                sub.append(name)
                held += -(-self._count(name) // self.target.world_size)
                if held >= SUB_GROUP or name == group[-1]:
                    found.append(sub)
                    sub, held = [], 0
        return found

    def _count(self, name: str) -> int:
        return math.prod(self._shape(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[f"model.{name}"].shape

    def _list_keys(self) -> list[str]:
        """The keys of optimizer state that has the shape of its parameter."""
        found: dict[str, None] = {}
        for full, tensor in self.tensors.items():
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            if tensor.role != "optimizer" or key == AVERAGE:
                continue
            if tensor.shape == self._shape(name) and not (key == "step" and not tensor.shape):
                found[key] = None
            elif key != "step":
                raise UsageError(
                    f"cannot convert this optimizer for DeepSpeed: {full} does not have its parameter's shape"
                )
        return list(found)

    def _lengths(self, group: Sequence[str]) -> tuple[int, int]:
        """The elements in each rank's part of a group, with padding, and in the whole group."""
        total, world_size = sum(map(self._count, group)), self.target.world_size
        if self.target.stage == 3:
            return sum(-(-self._count(name) // world_size) for name in group), total
        return -(-total // (2 * world_size)) * 2, total

    def _place(self, group: Sequence[str]) -> list[Piece]:
        shapes, world_size = {name: self._shape(name) for name in group}, self.target.world_size
        if self.target.stage == 3:
            return list(place_stage3(shapes, world_size))
        part, total = self._lengths(group)
        return list(place_in_order(shapes, [max(0, min(part, total - rank * part)) for rank in range(world_size)]))

    def _fill(self, pattern: str, dtype: torch.dtype) -> list[list[Tensor]]:
        """Fills the flat tensors of one kind: [group][rank]. pattern: tensor names, with {} for the parameter's."""
        flats = []
        for group in self.groups:
            part, _ = self._lengths(group)
            ranks = [self.mapped.make(part, dtype) for _ in range(self.target.world_size)]
            by_name: dict[str, list[Piece]] = {}
            for piece in self._place(group):
                by_name.setdefault(piece.name, []).append(piece)
            for name, pieces in by_name.items():
                if pattern.format(name) in self.tensors:  # an optimizer has no state for parameters without gradients
                    self.mapped.spread(pattern.format(name), pieces, ranks)
            flats.append(ranks)
        return flats

    def _describe_model(self) -> dict[str, Any]:
        target, counters = self.target, self.values["counters"]
        module: dict[str, Any] = OrderedDict()
        buffers = [name.removeprefix("model.") for name, tensor in self.tensors.items() if tensor.role == "buffer"]
        for name in [*self.trained, *self.frozen]:
            away = target.stage == 3  # DeepSpeed's own placeholders
            module[name] = (
                torch.zeros(0, dtype=target.dtype) if away else self.mapped.read(f"model.{name}", target.dtype)
            )
        module.update({name: self.mapped.read(f"model.{name}") for name in buffers})
        module.update({alias: module[name] for alias, name in self.aliases.items()})
        schedule = self.values.get("scheduler")
        saves_frozen = target.stage > 1
        return {
            **self.values["client_state"],
            "module": module,
            "buffer_names": buffers,
            "optimizer": None,
            "param_shapes": [OrderedDict((n, torch.Size(self._shape(n))) for n in group) for group in self.groups],
            "frozen_param_shapes": OrderedDict((n, torch.Size(self._shape(n))) for n in self.frozen)
            if saves_frozen
            else None,
            "shared_params": dict(self.aliases),
            "frozen_param_fragments": None,
            "lr_scheduler": {**schedule, "last_batch_iteration": schedule["last_epoch"] - 1} if schedule else None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": counters.get("skipped_steps", 0),
            "global_steps": counters["global_steps"],
            "global_samples": counters["global_samples"],
            "dp_world_size": target.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": VERSION,
        }

    def _cut_frozen(self) -> list[dict[str, Tensor]]:
        """The frozen parameters, or parts of them, in each file of model states. Empty at stage 1."""
        target = self.target
        if target.stage == 1:
            return []
        ranks = range(target.world_size if target.stage == 3 else 1)
        found: list[dict[str, Tensor]] = [OrderedDict() for _ in ranks]
        for name in self.frozen:
            flat = self.mapped.read(f"model.{name}", target.dtype)
            if target.stage == 2:
                found[0][name] = flat
                continue
            part = -(-self._count(name) // len(ranks))
            for rank in ranks:
                own = torch.zeros(part, dtype=flat.dtype)
                given = flat.reshape(-1)[rank * part : (rank + 1) * part]
                own[: given.numel()] = given
                found[rank][name] = own
        return found

    def _describe_optimizer(
        self, rank: int, weights: list[list[Tensor]], kept: dict[str, list[list[Tensor]]]
    ) -> dict[str, Any]:
        steps = [self._read_step(group) for group in self.groups]
        state = {
            number: {"step": step, **{key: flats[number][rank] for key, flats in kept.items()}}
            for number, step in enumerate(steps)
            if step is not None
        }
        inner = {"state": state, "param_groups": _describe_groups(self.values["optimizer"], self.groups, steps)}
        scaler = _make_scaler(self.values.get("loss_scaler"))
        common = {"loss_scaler": scaler, "dynamic_loss_scale": isinstance(scaler, DynamicLossScaler), "overflow": False}
        own = [flats[rank] for flats in weights]
        if self.target.stage == 3:
            count = {"zero_stage": 3, "partition_count": self.target.world_size}
            return {**common, **count, "optimizer_state_dict": inner, "fp32_flat_groups": own}
        parts = [self._lengths(group) for group in self.groups]
        lengths = [max(0, min(part, total - rank * part)) for part, total in parts]
        return {
            **common,
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": [flat[:n] for flat, n in zip(own, lengths, strict=True)],
            "zero_stage": self.target.stage,
            "group_paddings": [part - n for (part, _), n in zip(parts, lengths, strict=True)],
            "partition_count": [self.target.world_size] * len(self.groups),
            "ds_version": VERSION,
            "param_slice_mappings": [
                OrderedDict((p.name, _address(p)) for p in self._place(group) if p.rank == rank)
                for group in self.groups
            ],
        }

    def _read_step(self, group: Sequence[str]) -> int | None:
        """The number of steps that a group's parameters have taken; None if they have no optimizer state yet."""
        plain, found = self.values["optimizer"]["values"], set()
        for name in group:
            full = f"optimizer.{name}.step"
            if full in self.tensors:
                found.add(self.mapped.read_number(full))
            elif "step" in plain.get(name, {}):
                found.add(int(plain[name]["step"]))
        if len(found) > 1:
            raise UsageError(
                f"parameters of one group have taken {' and '.join(map(str, sorted(found)))} steps, "
                "but DeepSpeed has one step count per group",
                hint="--to fp32 writes only the weights",
            )
        known = any(f"optimizer.{name}.{key}" in self.tensors for name in group for key in self._list_keys())
        return found.pop() if found else int(self.values["counters"]["global_steps"]) if known else None


def _describe_groups(optimizer: Mapping[str, Any], parts: Sequence[Sequence[str]], steps: Any) -> list[dict[str, Any]]:
    """The optimizer's groups for DeepSpeed. parts: the parameter names in each flat tensor. steps: those of each part.

    A group refers to its flat tensors by number. DeepSpeed's own Adams require two keys that torch's do not have.
    """
    described: list[dict[str, Any]] = []
    number = 0
    for group in optimizer["groups"]:
        first, left = number, len(group["names"])
        while left > 0:
            left -= len(parts[number])
            number += 1
        more = {"bias_correction": True, "step": steps[first] or 0} if optimizer["class"] in ADAM else {}
        kept = {key: _plain(value) for key, value in group.items() if key != "names"}
        described.append({**more, **kept, "params": list(range(first, number))})
    return described


def _plain(value: Any) -> Any:
    """Replaces a tensor with one element by its number: DeepSpeed's own optimizers do not support tensors there."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _make_scaler(saved: Mapping[str, Any] | None) -> LossScaler | DynamicLossScaler:
    """The loss scale as DeepSpeed's object. Settings that our checkpoints do not store get DeepSpeed's defaults."""
    scaler: LossScaler | DynamicLossScaler
    if not saved or not saved["dynamic"]:
        scaler = LossScaler.__new__(LossScaler)
        vars(scaler).update(cur_scale=float(saved["scale"]) if saved else 1.0, dynamic=False)
        return scaler
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    vars(scaler).update(
        cur_scale=float(saved["scale"]), cur_iter=saved["step"], last_overflow_iter=saved["last_overflow"],
        scale_factor=2.0, scale_window=1000, min_scale=1, delayed_shift=2, cur_hysteresis=saved["borne"],
        consecutive_hysteresis=False, raise_error_at_min_scale=True, dynamic=True, dtype=torch.float16,
    )  # fmt: skip
    return scaler


def _view(block: memoryview, dtype: str) -> Tensor:
    """A block of a stream as a flat tensor. Valid only as long as the block."""
    return torch.frombuffer(block, dtype=DTYPES[dtype])


def _address(piece: Piece) -> FragmentAddress:
    address = FragmentAddress.__new__(FragmentAddress)
    vars(address).update(numel=piece.length, start=piece.start)
    return address
