"""What a rank that fails leaves behind, and which of several failures came first.

Where one rank fails, the others find their connections closed, or wait until they may wait no longer: such errors are
recognised, and never blamed while any rank has a cause of its own.

The first failure in time is shown, unless it only follows from another. Every end of a process without a record is a
failure, exit code 0 too. No time limit is added: only a collective that takes longer than `launch.timeout` is a stall.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from dsjob.contract.environment import mask
from dsjob.errors import (
    DataError,
    DsjobError,
    Interrupted,
    LaunchError,
    MetricError,
    Preempted,
    StorageError,
    TargetError,
)
from dsjob.ranks.stalls import (
    Beat,
    describe_places,
    describe_stall,
    find_stalled,
    parse_stack,
    show_stack,
)
from dsjob.trust.frames import TRACEBACK_HINT, describe_failure, find_path, find_place, list_frames

# What gloo, NCCL and torch's stores say on ranks that wait for another one in vain.
_WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|Application timeout caused pair closure|Socket Timeout|wait timeout after \d+ ?ms"
    r"|Watchdog caught collective operation timeout|Timed out after \d+ seconds waiting for clients"
)
# And on ranks that have lost one.
_LOST = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused)|Broken pipe|Socket closed|connectFullMesh"
    r"|gloo/transport/.*(?:[Rr]ead|[Ww]rite) error|failed to (?:recv|send), got 0 bytes|No route to host"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|ncclInProgress|ncclSystemError"
    r"|failure detected by another rank|DataLoader worker .*killed by signal: (?:Terminated|Killed)"
)
# And nothing more than that, where a process has ended.
_HUNG_UP = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|failed to recv, got 0 bytes")
# Errors that tell what the user's code, data or storage said, which may have connections of its own.
_QUOTING = (DataError, StorageError, TargetError, MetricError)
_TORCH_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
SAVED_CODES = (Preempted.exit_code, 128 + signal.SIGINT)  # of ranks that a signal has stopped after a step
_LINES = 12  # of a rank's last output that are shown


@dataclass(frozen=True)
class Failure:
    """How one rank failed. `time`: nanoseconds since the epoch. `follows`: another rank has caused it; `waited`: by not
    coming. `frames`: where the main thread was, innermost first. `path`: the place in the document that is at fault, if
    one is; `of_target`: the document itself is wrong there."""

    rank: int
    time: int
    message: str
    hint: str
    exit_code: int
    follows: bool
    waited: bool = False
    frames: list[str] = field(default_factory=list)
    path: list[str | int] = field(default_factory=list)
    of_target: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """How `rank` failed, where `error` ended it."""
        known = error if isinstance(error, DsjobError) else None
        return cls(
            rank=rank,
            time=time.time_ns(),
            message=mask(known.message) if known else describe_failure(error),
            hint=mask(known.hint) if known else TRACEBACK_HINT,
            exit_code=known.exit_code if known else 1,
            follows=follows_from_another(error),
            waited=has_waited(error),
            frames=list_frames(error)[:40],
            path=list(find_path(error)),
            of_target=isinstance(error, TargetError),
        )

    def to_error(self) -> DsjobError:
        """The error to raise for it where all ranks are known."""
        error: DsjobError
        if self.of_target and self.path:
            error = TargetError(f"{self.message} (rank {self.rank})", hint=self.hint)
        else:
            error = LaunchError(f"rank {self.rank}: {self.message}", hint=self.hint, exit_code=self.exit_code)
        error.path = tuple(self.path)
        return error


@dataclass(frozen=True)
class End:
    """How the process of a rank ended: its exit code, negative for signals, and when (nanoseconds since the epoch).

    `finished`: it has said that its work is done. `output`: the last lines that it wrote, as far as they were kept;
    `stacks`: what faulthandler has written of it. `timed_out`: NCCL has written its record of collectives.
    """

    rank: int
    code: int
    time: int
    finished: bool
    output: str = ""
    stacks: str = ""
    timed_out: bool = False

    @property
    def waited(self) -> bool:
        """Whether NCCL has ended the process for waiting too long, which only its output tells."""
        return self.code == -signal.SIGABRT and (self.timed_out or bool(_WAITED.search(self.output)))


def has_waited(error: BaseException) -> bool:
    """Whether an error is what a rank gets that has waited for another one in vain."""
    found = _find_cause(error)
    return found is not None and bool(_WAITED.search(str(found)))


def follows_from_another(error: BaseException) -> bool:
    """Whether an error is what a rank gets where another one has failed, or does not come."""
    found = _find_cause(error)
    if found is None:
        return False
    named = any(kind.__name__ in _TORCH_ERRORS for kind in type(found).__mro__)
    return named or has_waited(found) or bool(_LOST.search(str(found)))


def has_hung_up(error: BaseException) -> bool:
    """Whether an error says no more than that another rank's end of a connection was closed."""
    found = _find_cause(error)
    return found is not None and bool(_HUNG_UP.search(str(found)))


def _find_cause(error: BaseException) -> BaseException | None:
    """The error whose text tells of other ranks; None of a rank's own connections, to data and storage."""
    if isinstance(error, _QUOTING):  # collectives, and loaders whose workers were killed, raise RuntimeError
        return error.__cause__ if isinstance(error.__cause__, RuntimeError) else None
    return None if isinstance(error, OSError) else error


def record_failure(folder: str, rank: int, error: BaseException) -> Failure:
    """Writes what `rank` failed with into `folder`."""
    failure = Failure.of(rank, error)
    path = os.path.join(folder, f"error-{rank:05d}.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(asdict(failure), file)
    os.replace(f"{path}.new", path)
    return failure


def record_success(folder: str, rank: int) -> None:
    """Writes that `rank` has done its work: an exit code of 0 alone may be that of any library."""
    with open(os.path.join(folder, f"done-{rank:05d}"), "w", encoding="utf-8"):
        pass


def has_succeeded(folder: str, rank: int) -> bool:
    """Whether `rank` has said that its work is done."""
    return os.path.exists(os.path.join(folder, f"done-{rank:05d}"))


def read_failures(folder: str) -> list[Failure]:
    """What ranks have left behind of their ends, in the order of their ranks."""
    failures = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("error-") and name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                failures.append(Failure(**json.load(file)))
    return failures


def find_saved_end(failures: Sequence[Failure]) -> Preempted | Interrupted | None:
    """The end that a signal has asked for, where ranks have come to it."""
    for failure in failures:
        if failure.exit_code == Preempted.exit_code:
            return Preempted(failure.message, hint=failure.hint)
        if failure.exit_code == 128 + signal.SIGINT:
            return Interrupted(signal.SIGINT, failure.message, hint=failure.hint)
    return None


@dataclass(frozen=True)
class Scene:
    """What was found where a rank has failed: `ends` of those that ended by themselves; of the others, which were then
    ended, where they were (`beats`, `stacks`) and which were `stopped`. `logs`: the folder of their output. `stuck`:
    none has failed, and none has got anywhere."""

    failures: Sequence[Failure]
    ends: Sequence[End]
    beats: Mapping[int, Beat]
    stacks: Mapping[int, Sequence[str]]
    stopped: frozenset[int]
    world_size: int
    logs: str
    stuck: bool = False


def blame(scene: Scene) -> DsjobError:
    """The failure that came first: a rank's own error or sudden end, else the rank that the others have waited for."""
    if (saved := find_saved_end(scene.failures)) is not None:
        return saved
    told = {failure.rank for failure in scene.failures}
    sudden = [end for end in scene.ends if end.rank not in told and not (end.finished and end.code == 0)]
    own: list[tuple[int, DsjobError]] = [
        (failure.time, failure.to_error()) for failure in scene.failures if not failure.follows
    ]
    own += [(end.time, _describe_end(end, scene.logs)) for end in sudden if not _end_follows(end)]
    if own:
        return min(own, key=lambda item: item[0])[1]
    alive = set(range(scene.world_size)) - told - {end.rank for end in scene.ends}
    waited = scene.stuck or any(failure.waited for failure in scene.failures) or any(end.waited for end in sudden)
    return _describe_waiting(scene, alive, waited)


def _describe_waiting(scene: Scene, alive: set[int], waited: bool) -> LaunchError:
    """The end of a run in which every rank that has failed lacked another one."""
    stalled = find_stalled(scene.beats, alive, scene.stopped, scene.stacks) if waited else sorted(alive & scene.stopped)
    if stalled:
        message, stack = describe_stall(stalled, scene.beats, scene.stopped, scene.stacks)
        kept = f"stacks of all ranks and their output are in {scene.logs}"
        return LaunchError(message, hint=f"{stack}\n  {kept}" if stack else kept)
    places = {**scene.stacks, **{failure.rank: failure.frames for failure in scene.failures}}
    if waited and (different := describe_places(places)):
        return LaunchError(
            f"the ranks wait for one another in different collectives: {different}",
            hint="every rank has to enter the same collectives in the same order",
        )
    if scene.failures:
        first = min(scene.failures, key=lambda failure: failure.time)
        return LaunchError(f"rank {first.rank}: {first.message}", hint=first.hint)
    if scene.ends:
        return _describe_end(min(scene.ends, key=lambda end: end.time), scene.logs)
    return LaunchError("the ranks ended without a result", hint=f"their output is in {scene.logs}")


def _end_follows(end: End) -> bool:
    """Whether a process that said nothing was ended over another rank: NCCL aborts ranks that have waited."""
    return end.waited or (end.code == -signal.SIGABRT and bool(_LOST.search(end.output)))


def _describe_end(end: End, logs: str) -> LaunchError:
    """The sudden end of a rank's process, with its last words."""
    frames = parse_stack(end.stacks)
    place = f" at {find_place(frames)}" if frames else ""
    words = "\n".join(f"    {line}" for line in end.output.splitlines()[-_LINES:])
    parts = [show_stack(end.rank, frames), f"its last output:\n{words}" if words else "", f"its output is in {logs}"]
    hint = "\n  ".join(part for part in parts if part)
    if end.code >= 0:
        how = f"exited with code {end.code} before the last step and reported no error (os._exit in user code?)"
        return LaunchError(f"rank {end.rank} {how}", hint=hint)
    number = -end.code
    reason = " (the system kills processes that way when memory runs out)" if number == signal.SIGKILL else ""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return LaunchError(f"rank {end.rank} was killed by {name}{place}{reason}", hint=hint)
