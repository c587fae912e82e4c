"""The process of one rank that `launcher` has started: reads the resolved job, trains, and records how it ended."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from os import _exit  # the real one, which `exits` replaces
from typing import NoReturn

from dsjob import storage
from dsjob.contract.environment import hide_values
from dsjob.contract.masked_output import end_output, watch_output
from dsjob.contract.resolved import ResolvedJob
from dsjob.ranks.failures import Failure, record_failure, record_success
from dsjob.ranks.stalls import place_records, record_collectives
from dsjob.terminal import format_text, print_traceback
from dsjob.trust.grant import Trust

# Set by the launcher for its ranks. Commands never read them.
TRUST_VARIABLE = "DSJOB_TRUST"  # the trust that the launcher was granted
FOLDER_VARIABLE = "DSJOB_ERRORS"  # the launcher's private folder
DEBUG_VARIABLE = "DSJOB_DEBUG"
LAUNCHER_VARIABLE = "DSJOB_LAUNCHER"  # the launcher's process id
COMMAND_VARIABLE = "DSJOB_COMMAND"  # for what a command of `dsjob exec --no_python` starts: begins its `tell_program`


def run_rank(handed: str, run_dir: str) -> int:
    """Trains the job that the launcher has written to the file `handed`. Records a failure. Returns the exit code."""
    # Outside training, SIGINT kills the rank at once: it may be in a collective, where Python handlers cannot run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    shorten_warnings()
    end_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    from dsjob.launch.joining import join
    from dsjob.ranks.mesh import leave_world
    from dsjob.ranks.watchdog import FolderBoard, Watchdog, position
    from dsjob.training.job import run_job

    trust = Trust.from_text(os.environ[TRUST_VARIABLE])
    add_import_folders(trust.importable)
    number, folder = int(os.environ["RANK"]), os.environ[FOLDER_VARIABLE]
    try:
        job = ResolvedJob.from_text(storage.read_text(handed))
        hide_values(job.document)
        options = job.spec.launch
        # Before joining the others, so that a rank whose partners never arrive is ended too.
        Watchdog(FolderBoard(folder, number), rank=number, timeout=options.timeout)
        # NCCL reads its variables when the group is created, in `join`.
        record_collectives()
        place_records(run_dir)
        world = join(options, trust)
        run_job(job, run_dir, world, trust)
        leave_world()
    except BaseException as error:  # SystemExit too: a rank succeeds only by reaching the last step
        # So that the watchdog leaves this rank time to report its error.
        position.doing = "ending"
        if os.environ.get(DEBUG_VARIABLE):
            print_traceback(error)
        failure = Failure.of(number, error, stage=position.stage)
        record_failure(folder, failure)
        return failure.exit_code
    record_success(folder, number)
    return 0


def shorten_warnings() -> None:
    """Prints warnings of dsjob's own code in one line, to which Python would add a line of that code, and all warnings
    with printable texts."""
    usual, home = warnings.formatwarning, os.path.dirname(os.path.dirname(__file__)) + os.sep

    def form(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(home):
            return format_text(f"dsjob: warning: {message}")
        return format_text(usual(message, category, filename, lineno, line))

    warnings.formatwarning = form


def show_crashes() -> None:
    """Makes crashes (abort, segmentation fault) print the Python stack to standard error."""
    if not faulthandler.is_enabled():
        faulthandler.enable(2)


def add_import_folders(folders: Sequence[str]) -> None:
    """Makes the user's own modules importable. Installed packages take precedence."""
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)


def tell_program() -> None:
    """Tells the launcher whose command has started this program, if there is one, which process it is."""
    start = os.environ.pop(COMMAND_VARIABLE, "")
    with suppress(OSError):  # the launcher has ended
        if start:
            os.close(os.open(f"{start}{os.getpid()}", os.O_CREAT | os.O_WRONLY, 0o600))


def list_programs(start: str) -> list[int]:
    """The processes of the programs that a command has started. start: its COMMAND_VARIABLE."""
    folder, name = os.path.split(start)
    return [int(each.removeprefix(name)) for each in os.listdir(folder) if each.startswith(name)]


def name_command(folder: str, rank: int) -> str:
    """The COMMAND_VARIABLE of the command that is a rank. folder: the launcher's private one."""
    return os.path.join(folder, f"program-{rank:05d}-")


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process `parent`, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before prctl took effect
            end_rank(1)


def end_rank(code: int) -> NoReturn:
    """Ends this process, one of several ranks, at once.

    It skips the interpreter's shutdown, which may wait forever for a process group. Also, torch's threads may still run
    when their destructors are called, which would abort the process after its work is done.
    """
    end_output()
    _exit(code)


def end_joined(code: int) -> None:
    """Ends this process at once if it belongs to a process group; see `end_rank`."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        end_rank(code)


if __name__ == "__main__":
    with watch_output(descriptors=False):  # the launcher masks what reaches its output and the logs
        end_rank(run_rank(sys.argv[1], sys.argv[2]))
