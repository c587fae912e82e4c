"""Records of failed ranks, and the search for the failure that came first.

When one rank fails, the others find their connections closed, or time out while waiting. Such errors are recognised,
and are not blamed if any rank has a cause of its own.

The user sees the earliest failure that does not follow from another. A process that ends without a record has failed,
even with exit code 0. No time limits are added: a stall is only a collective that takes longer than `launch.timeout`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dsjob import errors
from dsjob.contract.masking import mask
from dsjob.errors import (
    DataError,
    DocumentError,
    DsjobError,
    LaunchError,
    MetricError,
    Preempted,
    Problem,
    StorageError,
    TargetError,
)
from dsjob.ranks.stalls import (
    Beat,
    describe_places,
    describe_stall,
    find_stalled,
    name_stage,
    parse_stack,
    read_stages,
    show_stack,
)
from dsjob.trust.frames import describe_failure, find_path, find_place, hint_at_failure, list_frames, read_message

# Messages of gloo, NCCL and torch's stores on ranks that timed out waiting for another one.
_WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|Application timeout caused pair closure|Socket Timeout|wait timeout after \d+ ?ms"
    r"|Watchdog caught collective operation timeout|Timed out after \d+ seconds waiting for clients"
)
# Their messages on ranks that lost the connection to another one.
_LOST = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused)|Broken pipe|Socket closed|connectFullMesh"
    r"|gloo/transport/.*(?:[Rr]ead|[Ww]rite) error|failed to (?:recv|send), got 0 bytes|No route to host"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|ncclInProgress|ncclSystemError"
    r"|failure detected by another rank|DataLoader worker .*killed by signal: (?:Terminated|Killed)"
)
# Of those, the ones that only say that the other process has ended.
_HUNG_UP = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|failed to recv, got 0 bytes")
# Errors that quote the user's code, data or storage. These may have connections of their own, with similar messages.
_QUOTING = (DataError, StorageError, TargetError, MetricError)
_TORCH_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
SAVED_CODES = (Preempted.exit_code, 128 + signal.SIGINT)  # exit codes of ranks that a signal stopped after a save
_LINES = 12  # lines of a rank's last output that are shown


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    time: nanoseconds since the epoch. follows: it is a consequence of another rank's failure. waited: it timed out
    waiting for another rank. kind: the class of `dsjob.errors`; for an error of user code, LaunchError. frames: of the
    main thread, innermost first. path: the place in the document that caused it, if any. problems: those of a
    DocumentError. stage: as in `Beat`; the rank's last beat may be older.
    """

    rank: int
    time: int
    message: str
    hint: str
    exit_code: int
    follows: bool
    waited: bool = False
    kind: str = LaunchError.__name__
    frames: list[str] = field(default_factory=list)
    path: list[str | int] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    stage: int = -1

    @classmethod
    def of(cls, rank: int, error: BaseException, hint: str = "", stage: int = -1) -> Failure:
        """The record of a rank that `error` ended. hint: for an error that does not come from dsjob."""
        known = (
            error
            if isinstance(error, DsjobError)
            else LaunchError(describe_failure(error), hint=hint or hint_at_failure(error))
        )
        problems = known.problems if isinstance(known, DocumentError) else ()
        return cls(
            rank=rank,
            time=time.time_ns(),
            message=mask(known.message),
            hint=mask(known.hint),
            exit_code=known.exit_code,
            follows=follows_from_another(error),
            waited=has_waited(error),
            kind=next(each.__name__ for each in type(known).__mro__ if each.__module__ == errors.__name__),
            frames=list_frames(error)[:40],
            path=list(find_path(error)),
            problems=[asdict(replace(each, message=mask(each.message), hint=mask(each.hint))) for each in problems],
            stage=stage,
        )

    def to_error(self, *, names_rank: bool = True) -> DsjobError:
        """The error as the rank raised it, with the rank's number if `names_rank`. An error of user code, whose class
        only the rank can import, becomes a LaunchError."""
        kind: type[DsjobError] = getattr(errors, self.kind)
        error = kind.__new__(kind)  # subclasses have constructors of their own
        if isinstance(error, DocumentError):
            problems = [Problem(**{**each, "path": tuple(each["path"])}) for each in self.problems]
            DocumentError.__init__(error, problems)
            return error
        message = self.message
        if names_rank:  # a TargetError's message begins with its path, which `to_problem` removes
            at_end = isinstance(error, TargetError) and self.path
            message = f"{message} (rank {self.rank})" if at_end else f"rank {self.rank}: {message}"
        DsjobError.__init__(error, message, hint=self.hint)
        error.exit_code, error.path = self.exit_code, tuple(self.path)
        return error


@dataclass(frozen=True)
class End:
    """How the process of a rank ended: its exit code (negative for signals), and when (nanoseconds since the epoch).

    finished: it reported that its work is done. output: its last lines, as far as they were kept. stacks: the output of
    faulthandler. timed_out: NCCL wrote its record of collectives.
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
        """Whether NCCL aborted the process because it waited too long. Only its output shows that."""
        return self.code == -signal.SIGABRT and (self.timed_out or bool(_WAITED.search(self.output)))


def has_waited(error: BaseException) -> bool:
    """Whether an error means that the rank timed out waiting for another one."""
    found = _find_cause(error)
    return found is not None and bool(_WAITED.search(read_message(found)))


def follows_from_another(error: BaseException) -> bool:
    """Whether an error means that another rank has failed or does not respond."""
    found = _find_cause(error)
    if found is None:
        return False
    named = any(kind.__name__ in _TORCH_ERRORS for kind in type(found).__mro__)
    return named or has_waited(found) or bool(_LOST.search(read_message(found)))


def has_hung_up(error: BaseException) -> bool:
    """Whether an error only says that another rank has closed its connection."""
    found = _find_cause(error)
    return found is not None and bool(_HUNG_UP.search(read_message(found)))


def _find_cause(error: BaseException) -> BaseException | None:
    """The error to search for messages about other ranks; None for errors of a rank's own connections, to data or
    storage."""
    if isinstance(error, _QUOTING):  # collectives, and loaders whose workers were killed, raise RuntimeError
        return error.__cause__ if isinstance(error.__cause__, RuntimeError) else None
    return None if isinstance(error, OSError) else error


def record_failure(folder: str, failure: Failure) -> None:
    """Writes the record of a failed rank to `folder`."""
    path = os.path.join(folder, f"error-{failure.rank:05d}.json")
    # The launcher may read the folder at any time, so write and rename.
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(asdict(failure), file)
    os.replace(f"{path}.new", path)


def record_success(folder: str, rank: int) -> None:
    """Records that `rank` has finished its work. Exit code 0 is not enough, since any library may exit with it."""
    with open(os.path.join(folder, f"done-{rank:05d}"), "w", encoding="utf-8"):
        pass


def has_succeeded(folder: str, rank: int) -> bool:
    """Whether `rank` has recorded that its work is done."""
    return os.path.exists(os.path.join(folder, f"done-{rank:05d}"))


def read_failures(folder: str) -> list[Failure]:
    """The records of failed ranks, in rank order."""
    failures = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("error-") and name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                failures.append(Failure(**json.load(file)))
    return failures


def find_saved_end(failures: Sequence[Failure]) -> DsjobError | None:
    """The end that a signal requested (Preempted, or Interrupted by Ctrl-C), if a rank reached it."""
    found = (failure for failure in failures if failure.exit_code in SAVED_CODES)
    return next((failure.to_error(names_rank=False) for failure in found), None)


@dataclass(frozen=True)
class Scene:
    """What is known after a failure.

    ends: of ranks that ended on their own. beats, stacks: where the other ranks were before they were ended. stopped:
    those in process state T. logs: the folder of the ranks' output. stuck: no rank failed, but none made progress.
    own_exits: the ranks ran a program of the user's, which decides on its exit code.
    """

    failures: Sequence[Failure]
    ends: Sequence[End]
    beats: Mapping[int, Beat]
    stacks: Mapping[int, Sequence[str]]
    stopped: frozenset[int]
    world_size: int
    logs: str
    stuck: bool = False
    own_exits: bool = False


def blame(scene: Scene) -> DsjobError:
    """The first failure: a rank's own error or sudden end; if there is none, the rank that the others waited for.

    The message does not name the rank if all ranks have failed alike, so that it is the one of a run on one rank.
    """
    error = _find_first(scene)
    stages = read_stages(scene.beats) | {each.rank: each.stage for each in scene.failures if each.stage >= 0}
    if (message := name_stage(error.message, stages)) != error.message:
        error.message = message
    return error


def _find_first(scene: Scene) -> DsjobError:
    if (saved := find_saved_end(scene.failures)) is not None:
        return saved
    # After a requested stop: first the earliest failure with a cause of its own, else the rank that the others waited
    # for.
    recorded = {failure.rank for failure in scene.failures}
    # Processes that ended without a record, except those that reported `done` and exited with 0.
    sudden = [end for end in scene.ends if end.rank not in recorded and not (end.finished and end.code == 0)]
    alike = len(recorded) == scene.world_size and len({failure.message for failure in scene.failures}) == 1
    own: list[tuple[int, DsjobError]] = [
        (failure.time, failure.to_error(names_rank=not alike)) for failure in scene.failures if not failure.follows
    ]
    own += [(end.time, _describe_end(end, scene)) for end in sudden if not _end_follows(end)]
    if own:
        return min(own, key=lambda item: item[0])[1]
    # Every failure follows from another one, so the cause is on a rank that has not failed.
    alive = set(range(scene.world_size)) - recorded - {end.rank for end in scene.ends}
    waited = scene.stuck or any(failure.waited for failure in scene.failures) or any(end.waited for end in sudden)
    return _describe_waiting(scene, alive, waited)


def _describe_waiting(scene: Scene, alive: set[int], waited: bool) -> DsjobError:
    """The error of a run in which every failed rank waited for another one."""
    stalled = find_stalled(scene.beats, alive, scene.stopped, scene.stacks) if waited else sorted(alive & scene.stopped)
    if stalled:
        message, stack = describe_stall(stalled, scene.beats, scene.stopped, scene.stacks)
        kept = f"the stacks and output of all ranks are in {scene.logs}"
        return LaunchError(message, hint=f"{stack}\n  {kept}" if stack else kept)
    # The frames of the errors for ranks that failed, stacks for the others.
    places = {**scene.stacks, **{failure.rank: failure.frames for failure in scene.failures}}
    if waited and (different := describe_places(places)):
        return LaunchError(
            f"ranks wait for each other in different collectives: {different}",
            hint="every rank must call the same collectives in the same order",
        )
    # A program may end early on one rank; the others then wait for it in a collective.
    early = [end for end in scene.ends if end.finished and end.code == 0]
    if scene.own_exits and scene.failures and early:
        left, lost = early[0].rank, min(scene.failures, key=lambda failure: failure.time)
        message = f"rank {left} has ended with exit code 0, but rank {lost.rank} waits for it"
        shared = "from ZeRO stage 1 on, all ranks must call the model, and its state_dict(), together"
        return LaunchError(message, hint=f"{shared}\n  rank {lost.rank}: {lost.message}\n  {lost.hint}")
    if scene.failures:
        return min(scene.failures, key=lambda failure: failure.time).to_error()
    if scene.ends:
        return _describe_end(min(scene.ends, key=lambda end: end.time), scene)
    return LaunchError("the ranks ended without a result", hint=f"their output is in {scene.logs}")


def _end_follows(end: End) -> bool:
    """Whether a process without a record ended because of another rank: NCCL aborts ranks that waited too long."""
    return end.waited or (end.code == -signal.SIGABRT and bool(_LOST.search(end.output)))


def _describe_end(end: End, scene: Scene) -> LaunchError:
    """The error for a process that ended suddenly, with its last output."""
    frames = parse_stack(end.stacks)
    place = f" at {find_place(frames)}" if frames else ""
    words = "\n".join(f"    {line}" for line in end.output.splitlines()[-_LINES:])
    parts = [show_stack(end.rank, frames), f"its last output:\n{words}" if words else ""]
    # Rank 0 prints to the screen, and a rank that was killed may have printed nothing.
    parts.append(f"its output is in {scene.logs}" if end.output else "")
    hint = "\n  ".join(part for part in parts if part)
    if end.code >= 0 and scene.own_exits:
        return LaunchError(f"rank {end.rank} exited with code {end.code}", hint=hint, exit_code=end.code)
    if end.code >= 0:
        how = f"exited with code {end.code} before the last step without reporting an error (os._exit in user code?)"
        return LaunchError(f"rank {end.rank} {how}", hint=hint)
    number = -end.code
    reason = " (the system may have run out of memory)" if number == signal.SIGKILL else ""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return LaunchError(f"rank {end.rank} was killed by {name}{place}{reason}", hint=hint)
