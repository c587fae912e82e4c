"""How DeepSpeed lays out a model in its files: flat partitions in, tensors by name out. No bytes are read here.

Stages 1 and 2: the parameters of a group follow one another in one flat tensor, which ranks have in equal parts, the
last ones shorter by its padding. Stage 3: each parameter is cut into equal parts by itself, the last one padded, and a
rank's parts follow one another in a flat tensor for each sub-group. What an optimizer keeps of a parameter's shape lies
as its weights do. (`runtime/zero/stage_1_and_2.py` and `stage3.py` of DeepSpeed 0.19.6.)
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
    """A part of a parameter: `length` elements from `at` on, which a rank has in its flat tensor from `start` on."""

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    at: int
    length: int


@dataclass
class Collected:
    """What has been found of a checkpoint: tensors, what the optimizer keeps as numbers, and the trained parameters."""

    boxes: Boxes
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_pieces(
        self, pieces: Sequence[Piece], ranks: Sequence[TorchFile], flats: Sequence[Tensor], pattern: str, role: str
    ) -> None:
        """Tensors that lie in the ranks' flat ones; `pattern`: what they are called, with {} for the parameter."""
        stored = [file.place_of(flat) for file, flat in zip(ranks, flats, strict=True)]
        for piece in pieces:
            name = pattern.format(piece.name)
            self.boxes.add_piece(name, role, piece.shape, stored[piece.rank], piece.at, piece.start, piece.length)

    def add_entry(
        self, key: str, values: Sequence[Any], pieces: Sequence[Piece], ranks: Sequence[TorchFile], shapes: Shapes
    ) -> None:
        """What the optimizer keeps under one key of one group: along the weights, or one value for all of them."""
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
            raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}")


def read_shapes(named: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as a file has them. Raises ValueError for what is no shape."""
    shapes = {str(name): tuple(shape) for name, shape in named.items()}
    wrong = next((n for n, shape in shapes.items() if any(type(size) is not int or size < 0 for size in shape)), None)
    if wrong is not None:
        raise ValueError(f"{wrong[:80]!r} has the shape {shorten(shapes[wrong])}")
    return shapes


def place_in_order(shapes: Shapes, lengths: Sequence[int]) -> Iterator[Piece]:
    """Stages 1 and 2: parameters one after the other, in parts as long as rank 0's (only the last ones are shorter)."""
    begin, part = 0, lengths[0]
    for name, shape in shapes.items():
        count = math.prod(shape)
        # A parameter may begin in one rank's part and end in a later one: one piece a rank that it touches.
        for rank in range(begin // part, (begin + count - 1) // part + 1) if count and part else ():
            low, high = max(begin, rank * part), min(begin + count, (rank + 1) * part)
            if rank >= len(lengths):
                raise ValueError(f"{name} goes beyond the end of its group")
            yield Piece(name, shape, rank, low - rank * part, low - begin, high - low)
        begin += count
    if begin != sum(lengths):
        spare = sum(lengths) - begin
        if not 0 <= spare < 2 * len(lengths):  # padding to twice the world size, which BF16_Optimizer keeps
            raise ValueError(f"the weights of a group are {sum(lengths)} elements, its shapes say {begin}")


def place_by_address(shapes: Shapes, addresses: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Stages 1 and 2 where parameters are padded one by one (DeepSpeed 0.19.8): as the ranks note where each lies."""
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
    """Stage 3: each parameter in equal parts, one a rank, the last one padded. `length`: elements that a rank has."""
    start = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        # Rounded up; small parameters may leave the last ranks with nothing but padding.
        part = -(-count // world_size)
        for rank in range(world_size):
            own = min(part, count - rank * part)
            if own > 0:
                yield Piece(name, shape, rank, start, rank * part, own)
        # Padding counts: the next parameter begins after a whole part on every rank.
        start += part
    if length not in (None, start):
        raise ValueError(f"a rank has {length} elements of a group of weights, its shapes say {start}")


def list_numbers(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The numbers of the parameters of each of an optimizer's groups.

    Raises ValueError where there are more than any model has: a small file may name one long list a million times.
    """
    given = [group["params"] for group in groups]
    if sum(map(len, given)) > MAX_PARAMETERS:
        raise ValueError(f"the optimizer's groups name more than {MAX_PARAMETERS} parameters")
    return [list(numbers) for numbers in given]


def list_entries(state: Mapping[str, Any], group: int, stage3: bool) -> dict[str, Any]:
    """What an optimizer keeps for one flat tensor of weights, step included."""
    if not stage3 and isinstance(state["base_optimizer_state"], list):  # elastic_checkpoint
        entries = dict(state["base_optimizer_state"][group])
        step = state.get("base_optimizer_state_step")
        return entries if step is None or "step" in entries else {**entries, "step": step}
    inner = state["optimizer_state_dict"] if stage3 else state["base_optimizer_state"]
    groups = inner["param_groups"]
    listed = zip(list_numbers(groups), groups, strict=True)
    number, settings = [(number, settings) for numbers, settings in listed for number in numbers][group]
    entries = dict(inner["state"].get(number) or {})
    if entries and "step" not in entries and type(settings.get("step")) is int:  # FusedAdam's
        entries["step"] = settings["step"]
    return entries
