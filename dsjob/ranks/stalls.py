"""Which rank the others wait for: what each has told of its place, compared, and stacks made readable.

Where all ranks that failed timed out waiting, blamed is the rank in process state T, else the one that has entered the
fewest collectives, else one that does not wait.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from dsjob.trust.frames import find_place

# What a launcher and its ranks share in their private folder.
FAILED_NAME = "failed"  # there once a rank has failed
RECORD_PREFIX = "nccl-rank-"  # NCCL's record of its collectives, in the folder of logs; the rank's number follows
# The launcher asks for stacks by it: SIGUSR1 and SIGUSR2 belong to schedulers and programs.
STACK_SIGNAL: int = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SECTION = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_DEEPEST = 12  # frames of a stack that are shown
_WHO_STOPS = "the run has ended it; SIGSTOP comes from a debugger, a scheduler that suspends jobs, or kill -STOP"


@dataclass(frozen=True)
class Beat:
    """Where a rank is: its optimizer step, micro steps and collectives so far, and what it is doing."""

    step: int
    micro_steps: int
    collectives: int
    doing: str
    time: float = 0.0  # seconds since the epoch

    @property
    def progress(self) -> tuple[int, int, int]:
        """What grows while a rank gets anywhere; collectives first, since all ranks take part in each."""
        return self.collectives, self.step, self.micro_steps

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Beat:
        return Beat(**json.loads(text))


def name_beat(rank: int) -> str:
    """The file with a rank's last beat."""
    return f"beat-{rank:05d}.json"


def name_stack(rank: int) -> str:
    """The file that a rank's stacks are written to, when it is asked and when it crashes."""
    return f"stacks-{rank:05d}.txt"


def parse_stack(text: str) -> tuple[str, ...]:
    """The main thread's frames in what faulthandler has written, innermost first, as `file:line in function`."""
    *_, last = _SECTION.split(text)  # faulthandler writes the oldest thread last
    return tuple(f"{file}:{line} in {function}" for file, line, function in _FRAME.findall(last))


def is_waiting(frames: Sequence[str]) -> bool:
    """Whether a stack ends in communication, or in a backward pass, which waits for communication."""
    return any("/torch/distributed/" in f or "in _engine_run_backward" in f for f in frames[:6])


def find_stalled(
    beats: Mapping[int, Beat], alive: Collection[int], stopped: Collection[int], stacks: Mapping[int, Sequence[str]]
) -> list[int]:
    """The ranks that the others wait for: stopped ones, or those behind all that have got furthest.

    `alive`: ranks that have not failed. Empty where all have got equally far and wait.
    """
    if held := sorted(set(stopped) & set(alive)):
        return held
    most = max((beat.collectives for beat in beats.values()), default=0)
    behind = sorted(rank for rank in alive if rank in beats and beats[rank].collectives < most)
    if behind:
        least = min(beats[rank].progress for rank in behind)
        return [rank for rank in behind if beats[rank].progress == least]
    return sorted(rank for rank in alive if stacks.get(rank) and not is_waiting(stacks[rank]))


def describe_stall(
    ranks: Sequence[int], beats: Mapping[int, Beat], stopped: Collection[int], stacks: Mapping[int, Sequence[str]]
) -> tuple[str, str]:
    """Of the ranks that the others wait for: what is known of the first, and its stack."""
    first = ranks[0]
    more = f" (so have ranks {', '.join(map(str, ranks[1:9]))})" if len(ranks) > 1 else ""
    beat, frames = beats.get(first), stacks.get(first, ())
    where = f"in step {beat.step + 1} ({beat.doing})" if beat else ""
    if first in stopped:
        seen = f"; it was last seen {where}" if where else ""
        return f"rank {first} was stopped by a signal: its process is in state T{seen}{more}", _WHO_STOPS
    at = f", at {find_place(frames)}" if frames else ", and does not answer"
    told = f"rank {first} has stalled {where}".rstrip()
    return f"{told}{more}{at}; the others waited for it", show_stack(first, frames)


def describe_places(stacks: Mapping[int, Sequence[str]]) -> str:
    """Where ranks stand that wait for one another: the places, each with its ranks, the fewest first."""
    places: dict[str, list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        if frames:
            places.setdefault(find_place(frames), []).append(rank)
    told = []
    for place, ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1])):
        first = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        told.append(f"rank{'s' if len(ranks) > 1 else ''} {first} at {place}")
    return "; ".join(told) if len(told) > 1 else ""


def show_stack(rank: int, frames: Sequence[str]) -> str:
    """A stack as lines, innermost first."""
    lines = [f"    {frame}" for frame in frames[:_DEEPEST]] + (["    ..."] if len(frames) > _DEEPEST else [])
    return "\n".join([f"stack of rank {rank}, innermost first:", *lines]) if frames else ""
