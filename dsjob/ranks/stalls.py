"""Finds the rank that the others wait for, by comparing their progress, and formats stacks. Works without torch.

If all failed ranks timed out while waiting, the rank to blame is one in process state T (stopped), else the one that
has entered the fewest collectives, else one that is not waiting.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from dsjob.trust.frames import find_place

# Files in the private folder that the launcher and its ranks share.
FAILED_NAME = "failed"  # exists once a rank has failed
RECORD_PREFIX = "nccl-rank-"  # NCCL's record of its collectives, in the folder of logs; followed by the rank
# With this signal, the launcher requests stacks. SIGUSR1 and SIGUSR2 are left to schedulers and programs.
STACK_SIGNAL: int = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_STARTING = re.compile(r"<frozen runpy>:|.*/dsjob/programs/rank\.py:")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_BEAT = re.compile(r"beat-(\d+)\.json")
_SECTION = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_DEEPEST = 12  # frames of a stack that are shown
_WHO_STOPS = "dsjob ended it; SIGSTOP comes from a debugger, a scheduler that suspends jobs, or kill -STOP"


@dataclass(frozen=True)
class Beat:
    """The progress of a rank: its optimizer step, micro steps, collectives entered, and current activity.

    joint: the collectives of groups of all ranks. Only these have the same number at the same line of a program.
    stage: the rank's stage in a pipeline; -1 without one.
    """

    step: int
    micro_steps: int
    collectives: int
    doing: str
    time: float = 0.0  # seconds since the epoch
    joint: int = 0
    stage: int = -1

    @property
    def progress(self) -> tuple[int, int, int]:
        """Increases while a rank makes progress. Collectives come first, because all ranks take part in each."""
        return self.collectives, self.step, self.micro_steps

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Beat:
        return Beat(**json.loads(text))


def name_beat(rank: int) -> str:
    """The file with a rank's last beat."""
    return f"beat-{rank:05d}.json"


def read_posted(folder: str) -> dict[int, Beat]:
    """The last beat of each rank that has posted one to `folder`."""
    beats = {}
    for name in os.listdir(folder):
        if match := _BEAT.fullmatch(name):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                beats[int(match[1])] = Beat.from_text(file.read())
    return beats


def name_stack(rank: int) -> str:
    """The file for a rank's stacks, which are written on request and on a crash."""
    return f"stacks-{rank:05d}.txt"


def parse_stack(text: str) -> tuple[str, ...]:
    """The main thread's frames in faulthandler's output, innermost first, as `file:line in function`."""
    *_, last = _SECTION.split(text)  # faulthandler writes the oldest thread, the main thread, last
    return tuple(f"{file}:{line} in {function}" for file, line, function in _FRAME.findall(last))


def is_waiting(frames: Sequence[str]) -> bool:
    """Whether a stack ends in communication, or in a backward pass, which may wait for it: not in a hook of one."""
    in_backward = bool(frames) and "in _engine_run_backward" in frames[0]
    return in_backward or any("/torch/distributed/" in frame for frame in frames[:6])


def find_stalled(
    beats: Mapping[int, Beat], alive: Collection[int], stopped: Collection[int], stacks: Mapping[int, Sequence[str]]
) -> list[int]:
    """The ranks that the others wait for: stopped ones, or those with the least progress.

    alive: ranks that have not failed. Empty if all ranks have made the same progress and wait.
    """
    if held := sorted(set(stopped) & set(alive)):
        return held
    # A rank that waits in a collective has entered it. The rank that it waits for has not, so its count is lower.
    most = max((beat.collectives for beat in beats.values()), default=0)
    behind = sorted(rank for rank in alive if rank in beats and beats[rank].collectives < most)
    if behind:
        # The ranks furthest back: the others that are behind may be waiting for these.
        least = min(beats[rank].progress for rank in behind)
        return [rank for rank in behind if beats[rank].progress == least]
    # All have entered the same collectives. A rank that is not waiting has not reached the next one.
    return sorted(rank for rank in alive if stacks.get(rank) and not is_waiting(stacks[rank]))


def describe_stall(
    ranks: Sequence[int], beats: Mapping[int, Beat], stopped: Collection[int], stacks: Mapping[int, Sequence[str]]
) -> tuple[str, str]:
    """A message about the first of the ranks that the others wait for, and its stack."""
    first = ranks[0]
    more = f" (and ranks {', '.join(map(str, ranks[1:9]))})" if len(ranks) > 1 else ""
    beat, frames = beats.get(first), stacks.get(first, ())
    where = f"in step {beat.step + 1} ({beat.doing})" if beat else ""
    if first in stopped:
        seen = f"; it was last seen {where}" if where else ""
        return f"rank {first} was stopped by a signal: its process is in state T{seen}{more}", _WHO_STOPS
    at = f", at {find_place(frames)}" if frames else ", and does not respond"
    stalled = f"rank {first} has stalled {where}".rstrip()
    return f"{stalled}{more}{at}; the other ranks waited for it", show_stack(first, frames)


def read_stages(beats: Mapping[int, Beat]) -> dict[int, int]:
    """The stage of each rank in a pipeline; empty without one."""
    return {rank: beat.stage for rank, beat in beats.items() if beat.stage >= 0}


def name_stage(message: str, stages: Mapping[int, int]) -> str:
    """A message that begins with a rank, with the rank's stage if there is a pipeline."""
    found = re.match(r"rank (\d+)\b", message)
    if found is None or int(found[1]) not in stages:
        return message
    return f"{found[0]} (stage {stages[int(found[1])]} of the pipeline){message[found.end() :]}"


def describe_places(stacks: Mapping[int, Sequence[str]]) -> str:
    """The code locations at which ranks wait for each other, each with its ranks; those with the fewest ranks first."""
    places: dict[str, list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        if frames:
            places.setdefault(find_place(frames), []).append(rank)
    listed = []
    for place, ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1])):
        first = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        listed.append(f"rank{'s' if len(ranks) > 1 else ''} {first} at {place}")
    return "; ".join(listed) if len(listed) > 1 else ""


def show_stack(rank: int, frames: Sequence[str]) -> str:
    """A stack as lines, innermost first, without the frames that start every program."""
    frames = list(frames)
    while frames and _STARTING.match(frames[-1]):
        frames.pop()
    lines = [f"    {frame}" for frame in frames[:_DEEPEST]] + (["    ..."] if len(frames) > _DEEPEST else [])
    return "\n".join([f"stack of rank {rank}, innermost first:", *lines]) if frames else ""


def record_collectives() -> None:
    """Makes NCCL record its last collectives, and write them to a file when one times out. Call it before the process
    group is created."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def place_records(run_dir: str) -> None:
    """Sets where NCCL writes its record: one file per rank, in the run's folder."""
    logs = os.path.join(run_dir, "logs")
    os.makedirs(logs, exist_ok=True)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(os.path.abspath(logs), RECORD_PREFIX))
