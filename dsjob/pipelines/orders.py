"""Schedules that a document can name: GPipe, 1F1B, interleaved 1F1B and zero-bubble.

Each is an order of passes on each rank, in which `place_messages` places what ranks send each other. The orders are
those of torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B,
ScheduleInterleavedZeroBubble), with which tests compare them. They come from the papers: GPipe (arXiv:1811.06965), 1F1B
(arXiv:1806.03377), its interleaved form (arXiv:2104.04473) and ZB1P (arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from dsjob.errors import UsageError
from dsjob.pipelines.instructions import (
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from dsjob.pipelines.schedules import PipeSchedule, Step

Kind = Literal["F", "B", "I", "W"]  # forward, backward, or the halves of backward: input and weight


class Pass(NamedTuple):
    """A pass over one micro batch on one rank. chunk: which of the rank's chunks of layers."""

    kind: Kind
    chunk: int
    micro: int


class Sent(NamedTuple):
    """A message, from the point of view of one rank. forward: an activation, else a gradient. chunk: the rank's own."""

    sends: bool
    forward: bool
    chunk: int
    micro: int


Order = tuple[Pass, ...]
Rounds = list[list[Pass | Sent]]  # of one rank: at most one pass in each round, then the messages at its end


class OrderedSchedule(PipeSchedule):
    """A schedule made from an order of passes. Rounds without work are empty steps."""

    @classmethod
    def order(cls, micro_batches: int, ranks: int, rank: int, chunks: int) -> Order:
        """The passes of one rank, in order."""
        raise NotImplementedError

    def __init__(self, micro_batches: int, stages: int, stage_id: int, chunks: int = 1) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.chunks = chunks
        self._rounds = _place_all(type(self), micro_batches, stages, chunks)[stage_id]
        self._buffers = max(_count_buffers(self._rounds, chunk) for chunk in range(chunks))

    def num_pipe_buffers(self) -> int:
        """As many as a chunk of this rank holds micro batches at once."""
        return self._buffers

    def steps(self) -> Iterator[Step]:
        last = len(self._rounds) - 1
        for number, found in enumerate(self._rounds):
            step: Step = [instruction for each in found for instruction in self._tell(each)]
            yield step + (
                [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if number == last and self._trains else []
            )

    @property
    def _trains(self) -> bool:
        return any(isinstance(each, Pass) and each.kind != "F" for found in self._rounds for each in found)

    def _tell(self, each: Pass | Sent) -> Iterator[BufferOpInstruction]:
        place = {"buffer_id": each.micro % self._buffers, **({"chunk": each.chunk} if self.chunks > 1 else {})}
        if isinstance(each, Pass):
            ends = (0, self.stages * self.chunks - 1)
            if each.kind == "F" and each.chunk * self.stages + self.stage_id in ends:
                yield LoadMicroBatch(**place)
            yield _PASSES[each.kind](**place)
        else:
            yield _MESSAGES[each.sends, each.forward](**place)


_PASSES = {"F": ForwardPass, "B": BackwardPass, "I": BackwardInputPass, "W": BackwardWeightPass}
_MESSAGES = {
    (True, True): SendActivation,
    (False, True): RecvActivation,
    (True, False): SendGrad,
    (False, False): RecvGrad,
}


class GPipeSchedule(OrderedSchedule):
    """All forward passes, then all backward passes."""

    @classmethod
    def order(cls, micro_batches: int, ranks: int, rank: int, chunks: int) -> Order:
        """See OrderedSchedule."""
        return tuple(Pass(kind, 0, micro) for kind in _FB for micro in range(micro_batches))


_FB: tuple[Kind, Kind] = ("F", "B")


class OneForwardOneBackward(OrderedSchedule):
    """1F1B: the passes of `TrainSchedule`; messages are received as soon as they are sent."""

    @classmethod
    def order(cls, micro_batches: int, ranks: int, rank: int, chunks: int) -> Order:
        """See OrderedSchedule."""
        return _alternate(micro_batches, ranks, rank, 1, hop=1)


class InterleavedSchedule(OrderedSchedule):
    """1F1B over several chunks of layers on each rank: chunk c of rank r is stage c * ranks + r."""

    @classmethod
    def order(cls, micro_batches: int, ranks: int, rank: int, chunks: int) -> Order:
        """See OrderedSchedule."""
        return _alternate(micro_batches, ranks, rank, chunks, hop=2)


class ZeroBubbleSchedule(OrderedSchedule):
    """ZB1P: the gradients of weights, for which no other rank waits, fill the bubbles of 1F1B."""

    @classmethod
    def order(cls, micro_batches: int, ranks: int, rank: int, chunks: int) -> Order:
        """See OrderedSchedule."""
        return _alternate(micro_batches, ranks, rank, chunks, hop=1, delay=rank)


class InferenceOrder(OrderedSchedule):
    """Forward passes alone."""

    @classmethod
    def order(cls, micro_batches: int, ranks: int, rank: int, chunks: int) -> Order:
        """See OrderedSchedule."""
        return tuple(Pass("F", chunk, micro) for chunk in range(chunks) for micro in range(micro_batches))


SCHEDULES: dict[str, type[OrderedSchedule]] = {
    "1f1b": OneForwardOneBackward,
    "gpipe": GPipeSchedule,
    "interleaved": InterleavedSchedule,
    "zero-bubble": ZeroBubbleSchedule,
}


def _alternate(micro: int, ranks: int, rank: int, chunks: int, *, hop: int, delay: int | None = None) -> Order:
    """First some forward passes: `hop` more for each rank between this one and the last. Then one forward and one
    backward pass in turn; then the rest of the backward passes.

    Micro batches go through the chunks in rounds of about `ranks`. delay: splits backward passes, and computes the
    gradients of weights so many passes later. Raises UsageError if the micro batches do not divide into rounds.
    """
    rounds = max(1, micro // ranks)
    if chunks > 1 and micro % rounds:
        fits = next(count for count in range(micro - 1, 0, -1) if count % max(1, count // ranks) == 0)
        raise UsageError(
            f"{micro} micro batches do not divide into {rounds} rounds on {ranks} stages with {chunks} chunks each",
            hint=f"use {fits} or {micro - micro % ranks + ranks} micro batches",
        )
    size = micro // rounds if chunks > 1 else micro
    total = [(chunk, first + n) for first in range(0, micro, size) for chunk in range(chunks) for n in range(size)]
    back = [(chunks - 1 - chunk, number) for chunk, number in total]
    early = min((chunks - 1) * size + hop * (ranks - 1 - rank), len(total))
    found = [Pass("F", *place) for place in total[:early]]
    for number, place in enumerate(back):
        found += [Pass("F", *each) for each in total[early + number : early + number + 1]]
        found.append(Pass("B" if delay is None else "I", *place))
        if delay is not None and number >= delay:
            found.append(Pass("W", *back[number - delay]))
    if delay:
        found += [Pass("W", *place) for place in back[-delay:]]
    return _merge(found)


def _merge(passes: list[Pass]) -> Order:
    """Both halves of a backward pass become one where nothing is between them."""
    found: list[Pass] = []
    for each in passes:
        if each.kind == "W" and found and found[-1] == each._replace(kind="I"):
            found[-1] = each._replace(kind="B")
        else:
            found.append(each)
    return tuple(found)


@cache
def _place_all(kind: type[OrderedSchedule], micro_batches: int, ranks: int, chunks: int) -> list[Rounds]:
    return place_messages([kind.order(micro_batches, ranks, rank, chunks) for rank in range(ranks)], chunks)


def place_messages(orders: Sequence[Order], chunks: int = 1) -> list[Rounds]:
    """The passes of each rank in rounds, with the messages between ranks at the end of the round that computes them.

    In each round, a rank takes its next pass if it has what that needs. So all ranks send and receive in one common
    order. Then no rank waits in a circle, even where messages of a rank are sent one after the other, as on a GPU's
    stream. Raises UsageError for orders that wait for ever.
    """
    ranks = len(orders)
    stages, done = ranks * chunks, set[tuple[Kind, int, int]]()
    left = [list(order[::-1]) for order in orders]
    found: list[Rounds] = [[] for _ in orders]
    while any(left):
        taken = {rank: each for rank in range(ranks) if (each := _find_ready(left[rank], rank, ranks, stages, done))}
        if not taken:
            waiting = {rank: rest[-1] for rank, rest in enumerate(left) if rest}
            raise UsageError(f"the passes wait for one another: {waiting}")
        for rank in range(ranks):
            found[rank].append([taken[rank]] if rank in taken else [])
        for rank, each in taken.items():
            left[rank].pop()
            stage = each.chunk * ranks + rank
            done.add((each.kind, stage, each.micro))
            _send(found, each, stage, ranks, stages)
    return found


def _send(found: list[Rounds], each: Pass, stage: int, ranks: int, stages: int) -> None:
    """Adds the message with the result of a pass to the rounds of both ranks."""
    forward = each.kind == "F"
    other = stage + 1 if forward else stage - 1
    if each.kind == "W" or not 0 <= other < stages:
        return
    found[stage % ranks][-1].append(Sent(True, forward, each.chunk, each.micro))
    found[other % ranks][-1].append(Sent(False, forward, other // ranks, each.micro))


def _find_ready(left: list[Pass], rank: int, ranks: int, stages: int, done: set[tuple[Kind, int, int]]) -> Pass | None:
    """The next pass of a rank, if all that it needs was computed in earlier rounds."""
    if not left:
        return None
    each = left[-1]
    stage, micro = each.chunk * ranks + rank, each.micro
    needs: tuple[bool, ...]
    if each.kind == "F":
        needs = (stage == 0 or ("F", stage - 1, micro) in done,)
    elif each.kind == "W":
        needs = (("I", stage, micro) in done,)
    else:
        later = stage == stages - 1 or any((kind, stage + 1, micro) in done for kind in _BI)
        needs = (("F", stage, micro) in done, later)
    return each if all(needs) else None


_BI: tuple[Kind, Kind] = ("B", "I")


def _count_buffers(rounds: Rounds, chunk: int) -> int:
    """How many micro batches a chunk holds at once, from when they arrive until their last backward pass is done."""
    held, most, last = set[int](), 1, {}
    events = [each for found in rounds for each in found if each.chunk == chunk]
    for place, each in enumerate(events):
        last[each.micro] = place
    for place, each in enumerate(events):
        held.add(each.micro)
        most = max(most, len(held))
        if last[each.micro] == place:
            held.discard(each.micro)
    return most
