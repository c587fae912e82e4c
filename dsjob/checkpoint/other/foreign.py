"""Represents the checkpoints of other programs: tensors as boxes of bytes in their files, and the run's plain state.

`Boxes` builds a manifest like dsjob's own, so the readers in `zero_to_fp32` and `shards` can convert, reshard and load
it without knowing where it came from.

DeepSpeed's flat partitions contain ranges of tensors, and any range of a row-major tensor is a few boxes.
Hyperparameters come from the document, not from the checkpoint. At stage 0, DeepSpeed stores optimizer state by
position; the names come from the engine's groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import encode
from dsjob.checkpoint.other.torch_files import CheckedFolder, Member, Stored, TorchFile
from dsjob.checkpoint.root.source import open_root
from dsjob.errors import CheckpointError

MAX_NODES, MAX_DEPTH = 1_000_000, 64


@dataclass(frozen=True)
class RunState:
    """A run's plain state, in dsjob's form. `scalars`: the optimizer's plain values, by parameter and key. `trained`:
    the names of the parameters that are not frozen. `rates`: the learning rate of each of the optimizer's groups.
    `scheduler`: None if the engine that saved it had no schedule."""

    counters: dict[str, int]
    scalars: dict[str, dict[str, Any]]
    trained: frozenset[str]
    rates: tuple[float, ...]
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    client_state: dict[str, Any]


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program. `run` is None if it contains only weights. `notes`: what is not restored."""

    url: str
    program: str
    checkpoint: layout.Checkpoint
    members: dict[str, list[Member]]
    run: RunState | None
    notes: tuple[str, ...] = ()

    def open(self) -> layout.Folder:
        """Its root folder. Files are verified against their zip checksums while they are read."""
        return CheckedFolder(open_root(self.url), self.members)

    @property
    def place(self) -> str:
        """The URL of its folder, for messages."""
        return storage.join(self.url, self.checkpoint.folder) if self.run is not None else self.url

    @property
    def steps_applied(self) -> int:
        """Optimizer steps that were not skipped: where a schedule continues that the checkpoint does not have."""
        counters = self.run.counters if self.run is not None else {}
        return counters.get("global_steps", 0) - counters.get("skipped_steps", 0)

    def values(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """The content of an equivalent state.json. `ours`: see `optimizer_values`."""
        run = self.run
        if run is None:
            return {}
        return {
            "counters": run.counters,
            "optimizer": self.optimizer_values(ours),
            "scheduler": encode(run.scheduler or {"last_epoch": self.steps_applied}, "scheduler"),
            "loss_scaler": run.scaler,
            "rng": {},
            "client_state": encode(run.client_state, "client_state"),
        }

    def optimizer_values(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's values for TrainingState.load_optimizer. `ours`: what the live optimizer would save.

        Groups and hyperparameters come from `ours`, moments and step counts from the checkpoint. Raises CheckpointError
        if the checkpoint has another optimizer or other parameters.
        """
        assert self.run is not None
        if not ours:
            return {}
        names = {name for group in ours["groups"] for name in group["names"]}
        if names != self.run.trained:
            new, gone = sorted(names - self.run.trained), sorted(self.run.trained - names)
            raise CheckpointError(
                f"{self.url}: its optimizer state belongs to other parameters than this run trains",
                hint="; ".join(f"{what}: {', '.join(n[:5])}" for what, n in (("new", new), ("missing", gone)) if n),
            )
        keys = {name.rpartition(".")[2] for name in self.checkpoint.tensors if name.startswith("optimizer.")}
        wanted = _KEYS.get(ours["class"])
        if keys and wanted is not None and not wanted <= keys | {"step"}:
            raise CheckpointError(
                f"{self.url}: its optimizer state has {', '.join(sorted(keys))}, but {ours['class']} needs "
                f"{', '.join(sorted(wanted))}",
                hint="use the optimizer that it was saved with, or load only the weights",
            )
        return {**ours, "values": self.run.scalars}


# The state tensors that each optimizer keeps per parameter.
_KEYS = {
    **{
        name: {"exp_avg", "exp_avg_sq"} for name in ("Adam", "AdamW", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam")
    },
    "Lion": {"exp_avg"},
    "Adagrad": {"sum"},
    "MuonWithAuxAdam": {"momentum_buffer"},
}


@dataclass
class Boxes:
    """Builds the manifest of a checkpoint from pieces of flat tensors."""

    folder: str
    sizes: dict[str, int] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    members: dict[str, list[Member]] = field(default_factory=dict)

    def know(self, file: TorchFile) -> TorchFile:
        """Registers a file, so that its members are verified when they are read."""
        self.members[file.name] = sorted(file.members.values())
        self.sizes[file.name.removeprefix(f"{self.folder}/")] = file.size
        return file

    def add(self, name: str, role: str, stored: Stored) -> None:
        """Adds a tensor that lies whole in one file."""
        self.add_piece(name, role, stored.shape, stored, 0, 0, math.prod(stored.shape))

    def add_piece(
        self, name: str, role: str, shape: Sequence[int], stored: Stored, at: int, start: int, count: int
    ) -> None:
        """Adds `count` elements of a tensor, beginning with element `at` in row-major order. Their data begin at
        element `start` of `stored`."""
        entry = self.entries.setdefault(name, {"role": role, "dtype": stored.dtype, "shape": list(shape), "chunks": []})
        if entry["dtype"] != stored.dtype or start < 0 or start + count > math.prod(stored.shape):
            raise ValueError(f"the size of {name} in {stored.file} does not match its shape")
        width = layout.WIDTH[stored.dtype]
        for first, offsets, sizes in split_range(tuple(shape), at, at + count):
            length = math.prod(sizes) * width
            place = {"file": stored.file.removeprefix(f"{self.folder}/"), "length": length}
            place["start"] = stored.start + (start + first - at) * width
            entry["chunks"].append({**place, "offsets": list(offsets), "sizes": list(sizes)})

    def finish(self, tag: str, step: int) -> layout.Checkpoint:
        """The complete manifest. Raises ValueError if the pieces of a tensor do not fill it exactly."""
        tensors = {}
        budget = layout.Budget()
        for name, entry in self.entries.items():
            try:
                tensors[name] = layout.parse_tensor(entry, self.sizes, budget)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        budget.require_runs()
        aliases = {
            alias: target for alias, target in self.aliases.items() if target in tensors and alias not in tensors
        }
        return layout.Checkpoint(tag, step, self.folder, dict(self.sizes), tensors, aliases, {})


def split_range(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields the boxes (first element, offsets, sizes) that together contain the elements `low` to `high` of a tensor,
    in row-major order. There are at most two per dim, plus one.

    Splits the range into an incomplete first row, whole rows, and an incomplete last row.
    """
    if low >= high:
        return
    if not shape:
        yield 0, (), ()
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = low // row, high // row
    if low % row or first == last:
        end = min(high - first * row, row)
        for start, offsets, sizes in split_range(rest, low % row, end):
            yield first * row + start, (first, *offsets), (1, *sizes)
        first += 1
    if first < last:
        yield first * row, (first, *(0 for _ in rest)), (last - first, *rest)
    if high % row and first <= last:
        for start, offsets, sizes in split_range(rest, 0, high % row):
            yield last * row + start, (last, *offsets), (1, *sizes)


def copy_plain(value: Any, budget: list[int], depth: int = 0) -> Any:
    """A copy of `value`, if it consists only of numbers, strings, lists, tuples and dicts. Otherwise raises ValueError.

    budget: a counter of the values still allowed. A small pickle can refer to the same list a billion times.
    """
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise ValueError("it has too many values, or is nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)) and type(value).__name__ in ("list", "tuple"):
        return type(value)(copy_plain(item, budget, depth + 1) for item in value)
    if isinstance(value, dict):
        return {copy_plain(k, budget, depth + 1): copy_plain(v, budget, depth + 1) for k, v in value.items()}
    raise ValueError(f"it contains a {type(value).__name__}")
