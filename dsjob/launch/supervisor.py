"""Supervises the processes of a job's ranks on this machine: starts and watches them, and ends all if one fails.

Each rank has its own session and is killed if its launcher dies (PR_SET_PDEATHSIG). Checkpoints survive this. After one
rank has failed, the watchdog of each other rank ends that rank after 3 s (10 s during a save). The launcher kills ranks
that no longer respond.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from dsjob.contract.masking import list_spellings
from dsjob.errors import DsjobError, Interrupted, LostRankError, Preempted
from dsjob.files import open_append
from dsjob.launch.rank import list_programs, name_command
from dsjob.launch.relay import Relay, prints_elsewhere
from dsjob.ranks import patience
from dsjob.ranks.failures import SAVED_CODES, End, Scene, blame, find_saved_end, has_succeeded, read_failures
from dsjob.ranks.signals import handling
from dsjob.ranks.stalls import (
    FAILED_NAME,
    RECORD_PREFIX,
    STACK_SIGNAL,
    Beat,
    name_beat,
    name_stack,
    parse_stack,
    read_posted,
)

_PERIOD = 0.05  # seconds between polls of the processes
_LOOKS = 1.0  # seconds between checks of their progress
_OUTPUT = 16 << 10  # bytes at the end of a rank's output to search for a cause
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class _Process:
    """One rank's process. `log`: the file with its output, from offset `begin`; empty for rank 0, which has no log file
    and prints to the launcher's output."""

    rank: int
    popen: Any  # a subprocess.Popen, or an object with its pid, poll and wait
    log: str = ""
    begin: int = 0
    end: End | None = None

    def read_output(self) -> str:
        if not self.log:
            return ""
        with open(self.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.begin, size - _OUTPUT))
            return file.read().decode(errors="replace")

    def is_stopped(self) -> bool:
        """Whether the process is suspended (SIGSTOP), and so cannot respond."""
        try:
            with open(f"/proc/{self.popen.pid}/stat", encoding="utf-8", errors="replace") as file:
                # Field 3 of /proc/PID/stat. The name before it is in parentheses, and may contain spaces.
                return file.read().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False


@dataclass
class Supervisor:
    """Runs and watches the ranks of one job. They rendezvous in the folder `private`, and log to the folder `logs`.

    `timeout`: seconds until a collective fails. `grace`: seconds after SIGTERM within which ranks must make progress.
    `own_exits`: the ranks run a program of the user's, which decides on its exit code: 0 means success.
    """

    private: str
    logs: str
    timeout: float
    grace: float
    own_exits: bool = False
    _all: list[_Process] = field(default_factory=list)
    _asked: int = 0  # the first signal that asked this process to end
    _asked_at: float = 0.0
    _stuck: bool = False  # no rank has made progress since that signal
    _at_once: bool = False  # a second signal, not SIGTERM: end without waiting for ranks
    _looked: float = 0.0  # time of the last progress check
    _moved: float = 0.0  # time of the last progress of any rank
    _progress: Sequence[tuple[int, int, int]] = ()
    _dumped: bool = False  # stacks were requested since the last progress
    _relay: Relay = field(default_factory=Relay)

    def run(self, command: Sequence[str], variables: Mapping[str, str], nproc: int) -> None:
        """Runs `command` as `nproc` ranks until they end. Raises the first failure, Preempted or Interrupted."""
        for name in os.listdir(self.logs):
            if name.startswith((RECORD_PREFIX, "stacks-")):  # left by an earlier run in the same folder
                os.unlink(os.path.join(self.logs, name))
        with handling(dict.fromkeys(_SIGNALS, self._take)):
            try:
                for rank in range(nproc):
                    self._start(rank, command, {**os.environ, **variables, **_describe_rank(rank, nproc)})
                self._wait()
            except BaseException:
                for process in self._all:
                    _kill(process)  # and its child processes
                raise
            finally:
                self._relay.close()

    def _take(self, number: int, _: Any) -> None:
        # A second SIGTERM is most likely the first one again, sent to both the process and its group. So it must not
        # interrupt a save.
        self._at_once = bool(self._asked) and number != signal.SIGTERM
        self._asked_at = self._asked_at if self._asked else time.monotonic()
        self._asked = self._asked or number
        for process in self._running():
            # Signal only the process, not its group: its data loader workers must survive while it saves. A shell would
            # pass on nothing, so the programs of `dsjob exec` that it has started get the signal instead.
            programs = list_programs(name_command(self.private, process.rank))
            for each in [each for each in programs if _is_in(each, process)] or [process.popen.pid]:
                _send(each, signal.SIGTERM if number == signal.SIGTERM else signal.SIGINT)

    def _start(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        if rank == 0 and prints_elsewhere():
            outputs = self._relay.open_stream(sys.stdout), self._relay.open_stream(sys.stderr)
            self._all.append(_Process(rank, start_process(command, env, *outputs)))
            for output in outputs:
                os.close(output)
            return
        if rank == 0:
            self._all.append(_Process(rank, start_process(command, env, None)))
            return
        path = os.path.join(self.logs, f"rank-{rank:05d}.log")
        with open_append(path) as file:
            begin = file.tell()
            if not list_spellings():
                self._all.append(_Process(rank, start_process(command, env, file), path, begin))
                return
        output = self._relay.open_log(path)
        self._all.append(_Process(rank, start_process(command, env, output), path, begin))
        os.close(output)

    def _running(self) -> list[_Process]:
        return [process for process in self._all if process.end is None]

    def _wait(self) -> None:
        self._moved = time.monotonic()
        while running := self._running():
            self._poll()
            if self._at_once:
                raise Interrupted(self._asked)
            failed = any(process.end and self._has_failed(process.end) for process in self._all)
            # `_end` waits for the other ranks to report too: the first to end is often not the first to fail.
            if failed or self._is_late() or self._is_stuck():
                error = self._end()
                raise self._describe_stop(error) if self._asked else error
            self._look(running)
            time.sleep(_PERIOD)
        if saved := find_saved_end(read_failures(self.private)):
            raise saved
        if early := next((each for each in self._all if each.end and each.end.code == Preempted.exit_code), None):
            raise Preempted(f"rank {early.rank} exited with code {Preempted.exit_code}")

    def _has_failed(self, end: End) -> bool:
        """Whether a rank has neither finished nor saved after a signal. A program that Ctrl-C ends saves nothing."""
        saved = (Preempted.exit_code,) if self.own_exits else SAVED_CODES
        return end.code not in (0, *saved) or (end.code == 0 and not end.finished)

    def _is_late(self) -> bool:
        """Whether some ranks have saved after a signal and ended, but another one has not in time."""
        saved = [each.end.time for each in self._all if each.end and each.end.code in SAVED_CODES]
        return bool(saved) and time.time_ns() - min(saved) > patience.TO_END * 1e9

    def _is_stuck(self) -> bool:
        """Whether ranks have made no progress for `grace` seconds since SIGTERM asked them to end."""
        since = max(self._asked_at, self._moved)
        if self._asked == signal.SIGTERM and time.monotonic() - since > self.grace:
            # A rank that is saving may take long without any other sign of progress.
            self._stuck = all(beat.doing != "saving" for beat in read_posted(self.private).values())
        return self._stuck

    def _poll(self) -> None:
        """Records which processes have ended, and relays the output of ranks."""
        for process in self._running():
            code = process.popen.poll()
            if code is not None:
                self._relay.pass_on()
                # Asked after `poll`, since a rank records its success just before it ends.
                finished = has_succeeded(self.private, process.rank) or (self.own_exits and code == 0)
                timed_out = os.path.exists(os.path.join(self.logs, f"{RECORD_PREFIX}{process.rank}"))
                words = ("", "") if finished else (process.read_output(), self._read_stacks(process))
                process.end = End(process.rank, code, time.time_ns(), finished, *words, timed_out)
        self._relay.pass_on()

    def _look(self, running: Sequence[_Process]) -> None:
        """Requests stacks when no rank makes progress. NCCL's timeout kills waiting ranks, so it must come before."""
        now = time.monotonic()
        if now - self._looked < _LOOKS:
            return
        self._looked, progress = now, [beat.progress for beat in read_posted(self.private).values()]
        # Any change on any rank counts, because ranks that wait for each other stop together.
        if progress != self._progress:
            self._progress, self._moved, self._dumped = progress, now, False
        elif now - self._moved > 0.8 * self.timeout and not self._dumped:
            self._dumped = True
            self._ask_for_stacks(running)

    def _end(self) -> DsjobError:
        """Ends the remaining ranks after one has failed. Returns the first failure."""
        # Before the ranks are ended: afterwards, nobody could say where they were.
        began, beats, left = time.monotonic(), read_posted(self.private), self._running()
        stopped = frozenset(process.rank for process in left if process.is_stopped())
        self._ask_for_stacks(left)
        # The watchdogs of the remaining ranks see this file, and end their ranks.
        with open(os.path.join(self.private, FAILED_NAME), "w", encoding="utf-8"):
            pass
        while (running := self._running()) and not self._at_once:
            beats_now = read_posted(self.private)
            for process in running:
                if process.rank in stopped or _is_overdue(beats_now.get(process.rank), began):
                    _kill(process)
                    # A process in state D (uninterruptible) ends only when its device responds.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.popen.wait(patience.TO_ANSWER)
                    # Marked as lost, so that this kill is not taken for the cause.
                    process.end = End(process.rank, LostRankError.exit_code, time.time_ns(), finished=False)
            self._poll()
            time.sleep(_PERIOD)
        self._keep_stacks()
        # Ranks that ended because another one failed are no causes.
        ends = [process.end for process in self._all if process.end and process.end.code != LostRankError.exit_code]
        stacks = {process.rank: parse_stack(self._read_stacks(process)) for process in left}
        failures, size = read_failures(self.private), len(self._all)
        return blame(Scene(failures, ends, beats, stacks, stopped, size, self.logs, self._stuck, self.own_exits))

    def _describe_stop(self, error: DsjobError) -> DsjobError:
        """The error for a run that a signal has ended. `error`: the first failure of the ranks."""
        failures = read_failures(self.private)
        if self._stuck and not isinstance(error, Preempted):
            message = f"stopped by SIGTERM, then no progress for {self.grace:g} s: {error.message}"
            return Interrupted(self._asked, message, hint=error.hint)
        if isinstance(error, Preempted) or any(not each.follows and each.exit_code < 128 for each in failures):
            return error
        stops = [each for each in failures if each.exit_code > 128]
        return Interrupted(self._asked, stops[0].message, hint=stops[0].hint) if stops else Interrupted(self._asked)

    def _ask_for_stacks(self, running: Sequence[_Process]) -> None:
        for process in running:
            # A rank installs its handler before its first heartbeat; until then the signal would kill it.
            if os.path.exists(os.path.join(self.private, name_beat(process.rank))):
                _send(process.popen.pid, STACK_SIGNAL)

    def _read_stacks(self, process: _Process) -> str:
        path = os.path.join(self.private, name_stack(process.rank))
        if not os.path.exists(path):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _keep_stacks(self) -> None:
        for process in self._all:
            if self._read_stacks(process):
                kept = os.path.join(self.logs, f"stacks-{process.rank:05d}.txt")
                shutil.copyfile(os.path.join(self.private, name_stack(process.rank)), kept)


def start_process(
    command: Sequence[str], env: Mapping[str, str], output: IO[bytes] | int | None, errors: int | None = None
) -> Any:
    """Starts a process in its own session. `output`: the file for its output (None: inherit this process's); `errors`:
    the file for its standard error (None: the same as `output`)."""
    stderr = output if errors is None else errors
    # A session of its own: Ctrl-C in the terminal reaches only the launcher, which passes it on.
    return subprocess.Popen(command, env=dict(env), stdout=output, stderr=stderr, start_new_session=True)


def _describe_rank(rank: int, nproc: int) -> dict[str, str]:
    size = str(nproc)
    found = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**found, "LOCAL_SIZE": size}  # the name that DeepSpeed's launcher sets


def _is_overdue(beat: Beat | None, began: float) -> bool:
    """Whether to stop waiting for a rank. A rank with a live watchdog gets more time: it ends on its own."""
    answers = beat is not None and time.time() - beat.time < patience.TO_ANSWER
    return time.monotonic() - began > (patience.TO_END if answers else patience.TO_ANSWER)


def _send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass


def _is_in(process: int, rank: _Process) -> bool:
    """Whether a process is in the session of a rank. Its number may have become another process's."""
    try:
        return bool(os.getsid(process) == rank.popen.pid)
    except ProcessLookupError:
        return False


def _kill(process: _Process) -> None:
    """Kills a rank's process and its child processes."""
    try:
        # The whole group: loader workers of a killed rank would otherwise live on.
        os.killpg(process.popen.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
