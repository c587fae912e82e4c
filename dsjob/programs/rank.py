"""The process of one rank of a program: runs the program as `python` would, and records how it failed.

`python -m dsjob.programs.rank KIND LOCAL_RANK NAME ARGUMENTS...`, see `launch.Program`. Before the program imports it,
nothing here imports torch. Once a process group exists, a watchdog compares the progress of the ranks. A rank that
`launch` did not start has no launcher to tell; it prints its own traceback.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import os
import runpy
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from dsjob.errors import ConfigError, DsjobError, Interrupted, UsageError
from dsjob.launch.rank import (
    COMMAND_VARIABLE,
    DEBUG_VARIABLE,
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    end_rank,
    end_with_parent,
    name_command,
)
from dsjob.programs import guard
from dsjob.programs.alias import STAND_IN
from dsjob.programs.told import describe
from dsjob.ranks import patience
from dsjob.ranks.failures import SAVED_CODES, Failure, record_failure
from dsjob.ranks.stalls import place_records, record_collectives
from dsjob.run_folder import marking_running
from dsjob.terminal import print_error

# Set by the launcher for its ranks.
RUN_VARIABLE = "DSJOB_RUN"  # the run folder; empty if this rank writes nothing there
LENIENT_VARIABLE = "DSJOB_LENIENT"  # as in `dsjob.engine.configs`: unknown keys of a DeepSpeed config are warnings
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
        if folder:
            os.environ[COMMAND_VARIABLE] = name_command(folder, int(os.environ["RANK"]))
        return _become(name, arguments, folder)
    run_dir = os.environ.pop(RUN_VARIABLE, "")
    record_collectives()
    if run_dir:
        place_records(run_dir)
    watch = guard.begin(folder, run_dir)
    code, message = 0, ""
    try:
        # Without a launcher of dsjob, which marks the folder otherwise.
        with marking_running(run_dir) if run_dir and not folder else nullcontext():
            _run(kind, name, arguments)
    except SystemExit as end:
        code = _read_code(end)
        message = f"exited with code {code}" if code else ""
    except BaseException as error:
        if not watch.is_here:
            return _report_fork(error, debug)
        failure = _report(error, watch, debug)
        code, message = failure.exit_code, failure.message
    if not watch.is_here:  # a process that the program has forked is no rank
        return code
    if code == 0 and os.environ.get("RANK", "0") == "0":
        _tell_unused()
    watch.end(code, message)
    return code


def _become(command: str, arguments: Sequence[str], folder: str) -> int:
    """Replaces this process by a command. Returns the exit code if the system cannot run it."""
    try:
        os.execvp(command, [command, *arguments])
    except OSError as error:
        hint = "a script begins with a line such as #!/bin/sh" if error.errno == errno.ENOEXEC else ""
        told = UsageError(f"cannot run {command}: {error.strerror}", hint=hint)
    failure = Failure.of(int(os.environ.get("RANK", "0")), told)
    if folder:
        record_failure(folder, failure)
    else:
        _say("dsjob: error: ", failure)
    return failure.exit_code


def _tell_unused() -> None:
    """Says so if the program has not used dsjob, which its author may not notice otherwise."""
    stands_in = os.environ.get("PYTHONPATH", "").startswith(STAND_IN)  # not with --engine deepspeed
    recording: Any = sys.modules.get("dsjob.programs.recording")
    if stands_in and (recording is None or not recording.DeepSpeedEngine.made):
        print_error(
            "dsjob exec: rank 0 has not called deepspeed.initialize, so dsjob's engine was not used; Hugging Face's"
            " Trainer calls it if TrainingArguments has deepspeed=..., and accelerate with a DeepSpeedPlugin"
        )


def _run(kind: str, name: str, arguments: Sequence[str]) -> None:
    """Runs a file or module as `__main__`, with the `sys.argv` and `sys.path` that Python would set."""
    sys.argv[:] = [name, *arguments]
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        _run_module(name)
    elif os.path.isdir(name) or zipfile.is_zipfile(name):
        runpy.run_path(name, run_name="__main__")
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        path = os.path.abspath(name)
        loader = SourceFileLoader("__main__", path)
        _execute(loader.source_to_code(loader.get_data(path), path), __file__=path, __loader__=loader)


def _run_module(name: str) -> None:
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, InspectLoader):
        raise UsageError(
            f"there is no module {name} to run", hint="python -m runs modules, and packages with __main__.py"
        )
    code = spec.loader.get_code(spec.name)
    if code is None:
        raise UsageError(f"the module {name} is not written in Python, so it cannot be run")
    sys.argv[0] = str(spec.origin)
    _execute(code, __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent)


def _execute(code: CodeType, **names: object) -> None:
    """Runs the code of `__main__`. It stays that module until the process ends: threads and exit handlers need it, and
    runpy would put back the old one."""
    module = ModuleType("__main__")
    module.__dict__.update(names, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _read_code(end: SystemExit) -> int:
    """The exit code of `sys.exit(...)`: any object but a number is a message."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stderr.write(f"{end.code}\n")  # the program's own words, as they are
    return 1


def _report(error: BaseException, watch: guard.Guard, debug: bool) -> Failure:
    """Tells the launcher, which prints it once; without one, prints it."""
    number = int(os.environ.get("RANK", "0"))
    failure = describe(number, Interrupted(2) if isinstance(error, KeyboardInterrupt) else error, debug=debug)
    failure = watch.blame(error, failure)
    if failure.exit_code in SAVED_CODES:  # a signal, on all ranks: no error
        if not (watch.folder or number):
            _say("dsjob: ", failure)
    elif isinstance(error, DsjobError) and not (watch.folder or failure.follows):
        from dsjob.ranks.telling import is_told, tell_others

        if not is_told(failure.message):
            start = "" if isinstance(error, ConfigError) else f"dsjob: error: rank {number}: "
            _say(start, failure)
            tell_others(failure.message)
    elif not watch.folder or number:  # the output of rank 0 is the launcher's, which will print it
        _say("dsjob: error: " if failure.follows else f"dsjob: error: rank {number}: ", failure)
    if watch.folder:
        record_failure(watch.folder, failure)
    # Threads, workers or exit handlers of a program that has failed may wait for other ranks.
    threading.Thread(target=_end_late, args=(failure.exit_code,), name="dsjob-end", daemon=True).start()
    return failure


def _report_fork(error: BaseException, debug: bool) -> int:
    """Prints the error of a process that the program has forked. Returns its exit code. The rank itself goes on."""
    failure = describe(int(os.environ.get("RANK", "0")), error, debug=debug)
    _say(f"dsjob: error: a process forked by rank {failure.rank}: ", failure)
    return failure.exit_code


def _say(start: str, failure: Failure) -> None:
    print_error(f"{start}{failure.message}\n  {failure.hint}".rstrip())


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
