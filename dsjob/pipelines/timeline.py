"""Follows the instructions of all stages: whether they fit together, and how long they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsjob.errors import UsageError
from dsjob.pipelines.instructions import (
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

Stream = list[PipeInstruction]  # the instructions of one rank, in order
_PAIRS: Mapping[type, type] = {SendActivation: RecvActivation, SendGrad: RecvGrad}
_PASSES: Mapping[type, str] = {ForwardPass: "F", BackwardPass: "B", BackwardInputPass: "I", BackwardWeightPass: "W"}
# A backward pass computes two gradients, each of which takes as long as a forward pass.
DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Span(NamedTuple):
    """A pass on one rank, from `start` to `end`."""

    kind: str  # F, B, I or W
    chunk: int
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of each rank of a pipeline, in order."""

    ranks: Sequence[Sequence[Span]]

    @property
    def length(self) -> float:
        """The end of the last pass."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait, from 0 to 1."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (self.length * len(self.ranks)) if self.length else 0.0


def to_record(timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON: the passes of each rank, and the share of time in which ranks wait."""
    ranks = [[span._asdict() for span in spans] for spans in timeline.ranks]
    return {"length": timeline.length, "bubble": timeline.bubble, "ranks": ranks}


def find_peer(instruction: PipeInstruction, rank: int, ranks: int, chunks: int) -> tuple[int, int] | None:
    """The rank and chunk that a message of `rank` goes to or comes from; None for other instructions, and at the ends
    of the pipeline."""
    if not isinstance(instruction, (SendActivation, RecvActivation, SendGrad, RecvGrad)):
        return None
    stage = instruction.chunk * ranks + rank
    other = stage + 1 if isinstance(instruction, (SendActivation, RecvGrad)) else stage - 1
    return (other % ranks, other // ranks) if 0 <= other < ranks * chunks else None


def require_sound(streams: Sequence[Stream], chunks: int, micro_batches: int, name: str) -> None:
    """Raises UsageError if a micro batch is not computed exactly once, or a stage computes with what it has not
    received, and what `require_pairs` raises.

    streams: of all stages. name: of the schedule, for messages.
    """
    for rank, stream in enumerate(streams):
        counted = Counter((_PASSES[type(each)], each.chunk) for each in _list_passes(stream))
        for chunk in range(chunks):
            forward = counted["F", chunk]
            backward = counted["B", chunk] + counted["I", chunk]
            if forward != micro_batches or backward not in (0, forward) or counted["I", chunk] != counted["W", chunk]:
                raise UsageError(
                    f"{name}: stage {rank} has {forward} forward and {backward} backward passes"
                    f" for {micro_batches} micro batches",
                    hint="each stage takes every micro batch forward once, and in training backward once",
                )
    require_pairs(streams, chunks, name)
    for rank, stream in enumerate(streams):
        for chunk in range(chunks):
            _require_received(stream, (rank, chunk), (len(streams), chunks), name)


def _require_received(stream: Stream, place: tuple[int, int], size: tuple[int, int], name: str) -> None:
    """Raises UsageError if a stage does not receive a message for each of its passes.

    place: the rank and the chunk. size: the number of each.
    """
    counted = Counter(type(each) for each in stream if isinstance(each, BufferOpInstruction) and each.chunk == place[1])
    forward, backward = counted[ForwardPass], counted[BackwardPass] + counted[BackwardInputPass]
    for kind, passes, count in ((RecvActivation, "forward", forward), (RecvGrad, "backward", backward)):
        if counted[kind] != count and find_peer(kind(0, chunk=place[1]), place[0], *size) is not None:
            raise UsageError(
                f"{name}: stage {place[0]} has {count} {passes} passes, but {counted[kind]} {kind.__name__}",
                hint="all stages but the first need a RecvActivation for each forward pass, and all but the last a"
                " RecvGrad for each backward pass",
            )


def find_most_held(stream: Stream, sizes: Sequence[int]) -> int:
    """The most that a rank holds at once, if a forward pass through chunk c leaves `sizes[c]` until the end of the
    backward pass."""
    held = most = 0
    for instruction in stream:
        if isinstance(instruction, ForwardPass):
            held += sizes[instruction.chunk]
            most = max(most, held)
        elif isinstance(instruction, (BackwardPass, BackwardWeightPass)):
            held -= sizes[instruction.chunk]
    return most


def _list_passes(stream: Stream) -> list[BufferOpInstruction]:
    return [each for each in stream if isinstance(each, BufferOpInstruction) and type(each) in _PASSES]


def require_pairs(streams: Sequence[Stream], chunks: int, name: str) -> None:
    """Raises UsageError if stages would wait for one another for ever, even if each message is received as it is
    sent."""
    left = [list(stream[::-1]) for stream in streams]
    while any(left):
        if not any(_advance(rank, left, chunks) for rank in range(len(left))):
            stuck = [f"stage {rank} in {rest[-1] if rest else 'its end'}" for rank, rest in enumerate(left)]
            raise UsageError(
                f"{name}: the stages would wait for one another for ever: {', '.join(stuck)}",
                hint="pair each SendActivation with a RecvActivation of the next stage, and each SendGrad with a"
                " RecvGrad of the previous one, in the same order",
            )


def _advance(rank: int, left: list[Stream], chunks: int) -> bool:
    """Runs instructions of a rank until it waits for another one. Returns whether it ran any."""
    moved = False
    while left[rank]:
        each = left[rank][-1]
        if isinstance(each, (SendActivation, RecvActivation, SendGrad, RecvGrad)):
            peer = find_peer(each, rank, len(left), chunks)
            there = left[peer[0]][-1] if peer is not None and left[peer[0]] else None
            if peer is None or there is None or type(there) is not _PAIRS.get(type(each)):
                return moved
            if find_peer(there, peer[0], len(left), chunks) != (rank, each.chunk):
                return moved
            left[peer[0]].pop()
        left[rank].pop()
        moved = True
    return moved


def simulate(streams: Sequence[Stream], chunks: int = 1, durations: Mapping[str, float] = DURATIONS) -> Timeline:
    """When each pass runs, if messages take no time, and wait for nobody. durations: of the kinds of passes."""
    ranks = len(streams)
    tracks = [_Track(rank, stream, ranks, chunks) for rank, stream in enumerate(streams)]
    arrivals: dict[tuple[bool, int, int], float] = {}  # (forward, stage, micro batch) -> time
    while any(track.run(arrivals, durations) for track in tracks):
        pass
    return Timeline([track.spans for track in tracks])


class _Track:
    """One rank of a simulation."""

    def __init__(self, rank: int, stream: Stream, ranks: int, chunks: int) -> None:
        self._rank, self._left, self._ranks, self._chunks = rank, list(stream[::-1]), ranks, chunks
        self._time = 0.0
        self._counts: Counter[tuple[type, int]] = Counter()
        self._micro: dict[tuple[int, int], int] = {}  # by chunk and buffer
        self._ends: dict[tuple[str, int, int], float] = {}
        self.spans: list[Span] = []

    def run(self, arrivals: dict[tuple[bool, int, int], float], durations: Mapping[str, float]) -> bool:
        """Runs until a message is missing. Returns whether anything ran."""
        moved = False
        while self._left and self._take(self._left[-1], arrivals, durations):
            self._left.pop()
            moved = True
        return moved

    def _take(
        self, each: PipeInstruction, arrivals: dict[tuple[bool, int, int], float], durations: Mapping[str, float]
    ) -> bool:
        if not isinstance(each, BufferOpInstruction):
            return True
        place, stage = (each.chunk, each.buffer_id), each.chunk * self._ranks + self._rank
        if isinstance(each, (LoadMicroBatch, RecvActivation)):
            self._micro[place] = self._counts[type(each), each.chunk]
            self._counts[type(each), each.chunk] += 1
        micro, kind = self._micro[place], _PASSES.get(type(each))
        if isinstance(each, SendActivation):
            arrivals[True, stage + 1, micro] = self._ends["F", each.chunk, micro]
        elif isinstance(each, SendGrad):
            ends = [self._ends[half, each.chunk, micro] for half in "BI" if (half, each.chunk, micro) in self._ends]
            arrivals[False, stage - 1, micro] = ends[0]
        elif kind is not None:
            needed = kind == "F"
            last = self._ranks * self._chunks - 1
            waits = (needed and stage > 0) or (kind in "BI" and stage < last)
            if waits and (needed, stage, micro) not in arrivals:
                return False
            start = max(self._time, arrivals[needed, stage, micro] if waits else 0.0)
            self._time = start + durations[kind]
            self._ends[kind, each.chunk, micro] = self._time
            self.spans.append(Span(kind, each.chunk, micro, start, self._time))
        return True
