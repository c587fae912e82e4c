"""Computes where each tensor lies in the flat partitions that DeepSpeed saves per rank. Reads no bytes.

Stages 1 and 2: the parameters of a group are concatenated to one flat tensor, which is cut into equal parts, one per
rank. The saved parts exclude the padding at the end. Stage 3: each parameter is cut into equal parts, the last one
padded, and each rank concatenates its parts, one flat tensor per sub-group. Optimizer state with the shape of its
parameter lies exactly like the weights. (See `runtime/zero/stage_1_and_2.py` and `stage3.py` of DeepSpeed 0.19.6.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from dsjob.checkpoint.other.foreign import Boxes
from dsjob.checkpoint.other.torch_files import FragmentAddress, TorchFile
from dsjob.contract.shown import shorten

MAX_PARAMETERS = 1 << 20
Shapes = Mapping[str, tuple[int, ...]]


class Piece(NamedTuple):
    """A part of a parameter: `length` elements, beginning with element `at` of the parameter, which lie from element
    `start` on in the flat tensor of `rank`."""

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    at: int
    length: int


@dataclass
class Collected:
    """The contents of a checkpoint as collected so far: tensors, the optimizer's plain numbers, trained parameters."""

    boxes: Boxes
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_pieces(
        self, pieces: Sequence[Piece], ranks: Sequence[TorchFile], flats: Sequence[Tensor], pattern: str, role: str
    ) -> None:
        """Adds tensors that lie in the flat tensors of the ranks. pattern: their names, with {} for the parameter's."""
        stored = [file.place_of(flat) for file, flat in zip(ranks, flats, strict=True)]
        for piece in pieces:
            name = pattern.format(piece.name)
            self.boxes.add_piece(name, role, piece.shape, stored[piece.rank], piece.at, piece.start, piece.length)

    def add_entry(
        self, key: str, values: Sequence[Any], pieces: Sequence[Piece], ranks: Sequence[TorchFile], shapes: Shapes
    ) -> None:
        """Adds optimizer state under one key of one group: flat like the weights, or one value for all parameters."""
        value = values[0]
        if isinstance(value, Tensor) and value.ndim == 1:
            self.add_pieces(pieces, ranks, values, f"optimizer.{{}}.{key}", "optimizer")
        elif isinstance(value, Tensor) and value.ndim == 0:
            stored = ranks[0].place_of(value)
            for name in shapes:
                self.boxes.add(f"optimizer.{name}.{key}", "optimizer", stored)
        elif type(value) in (int, float, bool):
            for name in shapes:
                self.scalars.setdefault(name, {})[key] = value
        elif value is not None:
            raise ValueError(f"the optimizer's {key} has an unsupported type: {type(value).__name__}")


def read_shapes(named: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes from a file. Raises ValueError for an invalid shape."""
    shapes = {str(name): tuple(shape) for name, shape in named.items()}
    wrong = next((n for n, shape in shapes.items() if any(type(size) is not int or size < 0 for size in shape)), None)
    if wrong is not None:
        raise ValueError(f"{wrong[:80]!r} has an invalid shape: {shorten(shapes[wrong])}")
    return shapes


def place_in_order(shapes: Shapes, lengths: Sequence[int]) -> Iterator[Piece]:
    """Stages 1 and 2: concatenated parameters, cut into parts of rank 0's length. The last parts may be shorter."""
    begin, part = 0, lengths[0]
    for name, shape in shapes.items():
        count = math.prod(shape)
        # A parameter may span the parts of several ranks: one piece for each of them.
        for rank in range(begin // part, (begin + count - 1) // part + 1) if count and part else ():
            low, high = max(begin, rank * part), min(begin + count, (rank + 1) * part)
            if rank >= len(lengths):
                raise ValueError(f"{name} extends beyond the end of its group")
            yield Piece(name, shape, rank, low - rank * part, low - begin, high - low)
        begin += count
    if begin != sum(lengths):
        spare = sum(lengths) - begin
        if not 0 <= spare < 2 * len(lengths):  # BF16_Optimizer saves its padding, up to twice the world size
            raise ValueError(f"a group has {sum(lengths)} elements, but its shapes add up to {begin}")


def place_by_address(shapes: Shapes, addresses: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Stages 1 and 2 with each parameter padded (DeepSpeed 0.19.8): uses the addresses that the ranks recorded."""
    for name, shape in shapes.items():
        at = 0
        for rank, known in enumerate(addresses):
            address = known.get(name)
            if address is not None:
                if not isinstance(address, FragmentAddress):
                    raise ValueError(f"the address of {name} is a {type(address).__name__}")
                start, count = int(vars(address)["start"]), int(vars(address)["numel"])
                yield Piece(name, shape, rank, start, at, count)
                at += count


def place_stage3(shapes: Shapes, world_size: int, length: int | None = None) -> Iterator[Piece]:
    """Stage 3: each parameter in equal parts, one per rank, the last one padded. `length`: elements per rank."""
    start = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        # Rounded up. For small parameters, the last ranks may have only padding.
        part = -(-count // world_size)
        for rank in range(world_size):
            own = min(part, count - rank * part)
            if own > 0:
                yield Piece(name, shape, rank, start, rank * part, own)
        # Padding is stored: on every rank, the next parameter begins after a whole part.
        start += part
    if length not in (None, start):
        raise ValueError(f"a rank has {length} elements of a group, but its shapes require {start}")


def list_numbers(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The parameter numbers in each group of an optimizer.

    Raises ValueError beyond MAX_PARAMETERS: a small hostile file can refer to one long list a million times.
    """
    given = [group["params"] for group in groups]
    if sum(map(len, given)) > MAX_PARAMETERS:
        raise ValueError(f"the optimizer's groups have more than {MAX_PARAMETERS} parameters")
    return [list(numbers) for numbers in given]


def list_entries(state: Mapping[str, Any], group: int, stage3: bool) -> dict[str, Any]:
    """The optimizer state for one flat tensor of weights, including its step."""
    if not stage3 and isinstance(state["base_optimizer_state"], list):  # elastic_checkpoint
        entries = dict(state["base_optimizer_state"][group])
        step = state.get("base_optimizer_state_step")
        return entries if step is None or "step" in entries else {**entries, "step": step}
    inner = state["optimizer_state_dict"] if stage3 else state["base_optimizer_state"]
    groups = inner["param_groups"]
    listed = zip(list_numbers(groups), groups, strict=True)
    number, settings = [(number, settings) for numbers, settings in listed for number in numbers][group]
    entries = dict(inner["state"].get(number) or {})
    if entries and "step" not in entries and type(settings.get("step")) is int:  # FusedAdam counts steps per group
        entries["step"] = settings["step"]
    return entries
