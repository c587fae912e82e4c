"""The process of one rank of a program: runs the program as `python` would, and records how it failed.

`python -m dsjob.programs.rank KIND LOCAL_RANK NAME ARGUMENTS...`, see `launch.Program`. Before the program imports it,
nothing here imports torch. Once a process group exists, a watchdog compares the progress of the ranks. A rank that
`launch` did not start has no launcher to tell; it prints its own traceback.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import time
from collections.abc import Sequence

from dsjob.errors import Interrupted
from dsjob.launch.rank import DEBUG_VARIABLE, FOLDER_VARIABLE, LAUNCHER_VARIABLE, end_rank, end_with_parent
from dsjob.programs import guard
from dsjob.programs.told import describe
from dsjob.ranks import patience
from dsjob.ranks.failures import record_failure

# Set by the launcher for its ranks.
RUN_VARIABLE = "DSJOB_RUN"  # the run folder; empty if this rank writes nothing there
LENIENT_VARIABLE = "DSJOB_LENIENT"  # 1: unknown keys of a DeepSpeed config are warnings

_code = 0


def main(words: Sequence[str]) -> int:
    """Runs the program; returns its exit code."""
    kind, local_rank, name, *arguments = words
    # The program's child processes are no ranks: they must not find these.
    folder, launcher = os.environ.pop(FOLDER_VARIABLE, ""), os.environ.pop(LAUNCHER_VARIABLE, "")
    debug = bool(os.environ.pop(DEBUG_VARIABLE, ""))
    if folder:
        end_with_parent(int(launcher))
    if local_rank == "1":
        arguments.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    if kind == "command":
        os.execvp(name, [name, *arguments])
    watch = guard.begin(folder, os.environ.pop(RUN_VARIABLE, ""))
    try:
        _run(kind, name, arguments)
    except SystemExit as end:
        watch.end()
        return _read_code(end)
    except BaseException as error:
        return _report(error, watch, folder, debug)
    watch.end()
    return 0


def _run(kind: str, name: str, arguments: Sequence[str]) -> None:
    """Runs a file or module as `__main__`, with the `sys.argv` and `sys.path` that Python would set."""
    sys.argv[:] = [name, *arguments]
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if os.path.isfile(name):  # runpy adds a folder or an archive itself
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
    runpy.run_path(name, run_name="__main__")


def _read_code(end: SystemExit) -> int:
    """The exit code of `sys.exit(...)`: any object but a number is a message."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


def _report(error: BaseException, watch: guard.Guard, folder: str, debug: bool) -> int:
    """Tells the launcher in `folder`, which prints it once; without one, prints it. Returns the exit code."""
    number = int(os.environ.get("RANK", "0"))
    failure = describe(number, Interrupted(2) if isinstance(error, KeyboardInterrupt) else error, debug=debug)
    watch.fail(failure.message)
    if not folder or number:  # the output of rank 0 is the launcher's, which will print it
        print(f"dsjob: error: rank {number}: {failure.message}\n  {failure.hint}", file=sys.stderr)  # noqa: T201
    if folder:
        record_failure(folder, failure)
    # Threads, workers or exit handlers of a program that has failed may wait for other ranks.
    threading.Thread(target=_end_late, args=(failure.exit_code,), name="dsjob-end", daemon=True).start()
    return failure.exit_code


def _end_late(code: int) -> None:
    time.sleep(patience.TO_TELL)
    end_rank(code)


def _leave() -> None:
    """The last exit handler: skips the rest of the interpreter's shutdown, see `end_rank`."""
    end_rank(_code)


if __name__ == "__main__":
    atexit.register(_leave)  # the first one registered is the last one called
    _code = main(sys.argv[1:])
    sys.exit(_code)
