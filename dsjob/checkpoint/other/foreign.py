"""What a checkpoint of another program is to dsjob: tensors as boxes of bytes in its files, and a run's plain state.

`Boxes` puts a manifest together that the readers of `zero_to_fp32` and `shards` take as if it were dsjob's own, so that
converting, resharding and loading need to know nothing of where it came from.

A flat partition of DeepSpeed's holds ranges of tensors, and any range of a row-major tensor is a few boxes.
Hyperparameters are the document's; what DeepSpeed stores by position (stage 0) gets its names from the engine's
groups.
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
    """What a run has beside tensors, as ours would keep it. `scalars`: the optimizer's, by parameter and key."""

    counters: dict[str, int]
    scalars: dict[str, dict[str, Any]]
    trained: frozenset[str]
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    client_state: dict[str, Any]


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program; `run` is None where it holds weights alone. `notes`: what begins anew."""

    url: str
    program: str
    checkpoint: layout.Checkpoint
    members: dict[str, list[Member]]
    run: RunState | None
    notes: tuple[str, ...] = ()

    def open(self) -> layout.Folder:
        """Its root, whose files are compared with their checksums as they are read."""
        return CheckedFolder(open_root(self.url), self.members)

    @property
    def place(self) -> str:
        """Its folder."""
        return storage.join(self.url, self.checkpoint.folder) if self.run is not None else self.url

    def values(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """What the state.json of a checkpoint of ours would hold; `ours` as in `optimizer_values`."""
        run = self.run
        if run is None:
            return {}
        return {
            "counters": run.counters,
            "optimizer": self.optimizer_values(ours),
            "scheduler": encode(run.scheduler, "scheduler"),
            "loss_scaler": run.scaler,
            "rng": {},
            "client_state": encode(run.client_state, "client_state"),
        }

    def optimizer_values(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state as TrainingState.load_optimizer takes it, `ours` being what the live one would save.

        Groups and hyperparameters stay ours; moments and step counts are theirs. Raises CheckpointError where they are
        of another kind of optimizer.
        """
        assert self.run is not None
        if not ours:
            return {}
        names = {name for group in ours["groups"] for name in group["names"]}
        if names != self.run.trained:
            new, gone = sorted(names - self.run.trained), sorted(self.run.trained - names)
            raise CheckpointError(
                f"{self.url} holds the optimizer's state of other parameters than are trained now",
                hint="; ".join(f"{what}: {', '.join(n[:5])}" for what, n in (("new", new), ("missing", gone)) if n),
            )
        keys = {name.rpartition(".")[2] for name in self.checkpoint.tensors if name.startswith("optimizer.")}
        wanted = _KEYS.get(ours["class"])
        if keys and wanted is not None and not wanted <= keys | {"step"}:
            raise CheckpointError(
                f"{self.url} holds {', '.join(sorted(keys))} of an optimizer, but {ours['class']} keeps "
                f"{', '.join(sorted(wanted))}",
                hint="use the optimizer that it was saved with, or load the weights alone",
            )
        return {**ours, "values": self.run.scalars}


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
    """Collects the tensors of a checkpoint from pieces of flat ones."""

    folder: str
    sizes: dict[str, int] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    members: dict[str, list[Member]] = field(default_factory=dict)

    def know(self, file: TorchFile) -> TorchFile:
        """Takes the members of a file in."""
        self.members[file.name] = sorted(file.members.values())
        self.sizes[file.name.removeprefix(f"{self.folder}/")] = file.size
        return file

    def add(self, name: str, role: str, stored: Stored) -> None:
        """A tensor that is whole in one file."""
        self.add_piece(name, role, stored.shape, stored, 0, 0, math.prod(stored.shape))

    def add_piece(
        self, name: str, role: str, shape: Sequence[int], stored: Stored, at: int, start: int, count: int
    ) -> None:
        """`count` elements of a tensor from its `at`-th on, in row-major order: those of `stored` from `start` on."""
        entry = self.entries.setdefault(name, {"role": role, "dtype": stored.dtype, "shape": list(shape), "chunks": []})
        if entry["dtype"] != stored.dtype or start < 0 or start + count > math.prod(stored.shape):
            raise ValueError(f"{name} is not as long in {stored.file} as its shape says")
        width = layout.WIDTH[stored.dtype]
        for first, offsets, sizes in split_range(tuple(shape), at, at + count):
            length = math.prod(sizes) * width
            place = {"file": stored.file.removeprefix(f"{self.folder}/"), "length": length}
            place["start"] = stored.start + (start + first - at) * width
            entry["chunks"].append({**place, "offsets": list(offsets), "sizes": list(sizes)})

    def finish(self, tag: str, step: int) -> layout.Checkpoint:
        """The checkpoint. Raises ValueError for tensors that their pieces do not make whole."""
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
    """The boxes of a tensor that hold its elements from `low` up to `high` in row-major order.

    Each comes with the position of its first element. There are at most two for each dim, and one more.
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
    """`value` if it is made of numbers, text, lists, tuples and dicts alone; ValueError otherwise.

    `budget`: how many values it may have in all, counted down: a pickle can hold one list a billion times.
    """
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise ValueError("it holds too many values, or too deep a tree of them")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)) and type(value).__name__ in ("list", "tuple"):
        return type(value)(copy_plain(item, budget, depth + 1) for item in value)
    if isinstance(value, dict):
        return {copy_plain(k, budget, depth + 1): copy_plain(v, budget, depth + 1) for k, v in value.items()}
    raise ValueError(f"it holds a {type(value).__name__}")
