"""Programs of Python that tests start, without the seconds in which a new interpreter imports torch.

A program is what `python -m MODULE`, `python -c CODE`, `python FILE` or the `dsjob` command would start, but as a fork
(`forks`). So are the ranks that dsjob's launcher and torchrun start in it. All else is as in production, apart from
hash seeds, which forks share, modules, which are imported already, and how long ranks wait for one another (PATIENCE).
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import IO, NoReturn

import torch
from forks import begin_anew, get_forks

DSJOB = str(Path(sys.executable).with_name("dsjob"))
TESTS = Path(__file__).parent.parent
PATIENCE = 1.0, 2.0, 2.0  # dsjob.ranks.patience: TO_NOTICE, TO_ANSWER, TO_BE_SEEN; for ranks on one machine
RANKS = "ranks"  # the file with the process ids of the ranks that a program has started


def clean_env(**changes: str) -> dict[str, str]:
    """This environment without what a launcher of ranks may have left in it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DSJOB_STORE")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, "OMP_NUM_THREADS": "1", **changes}


class Program:
    """What tests ask of a subprocess.Popen, for `command` as a fork in a session of its own."""

    def __init__(
        self, command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, merged: bool = False
    ) -> None:
        """`env`: the whole environment, by default `clean_env`. `merged`: what it writes to stderr goes to stdout."""
        self.args = [str(word) for word in command]
        self._folder = tempfile.TemporaryDirectory()
        outputs = [f"{self._folder.name}/{name}" for name in ("stdout", "stdout" if merged else "stderr")]
        self._start(cwd, clean_env() if env is None else env, outputs)

    def _start(self, cwd: str | Path, env: Mapping[str, str], outputs: list[str]) -> None:
        given = (self.args, str(cwd), dict(env), self._folder.name, outputs)
        self._process = get_forks().Process(target=_begin, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Waits for its end; what it has written to stdout and to stderr."""
        self.wait(timeout)
        return self.stdout, self.stderr

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    @property
    def stdout(self) -> str:
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        return self._read("stderr")

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks by rank, where a launcher has started any; one rank is the program itself."""
        return [int(pid) for pid in self._read(RANKS).split()]

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text() if path.exists() else ""


class Rank(Program):
    """Stands in for `dsjob.launch.supervisor.start_process` where the launcher runs in the test's own process."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: IO[bytes] | int | None,
        errors: IO[bytes] | int | None = None,
    ) -> None:
        self.args = list(command)
        self._folder = tempfile.TemporaryDirectory()
        streams = (1 if output is None else output, errors or output or 2)
        numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        self._start(os.getcwd(), env, [f"/proc/{os.getpid()}/fd/{number}" for number in numbers])
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # the launcher signals the group
            time.sleep(0.001)


def run_program(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a Program to its end."""
    program = Program(command, cwd=cwd, env=env, merged=merged)
    try:
        outputs = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.returncode or 0, *outputs)


def find_processes(folder: Path) -> list[int]:
    """The processes that run in a folder: all that a program there has started, unless they have gone elsewhere."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and (entry / "cwd").readlink() == folder:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class Fork:
    """What launchers ask of a subprocess.Popen, for a fork of this process that becomes what `args` would start."""

    recorded = ""  # the file that the process ids go to

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        start_new_session: bool = True,
    ) -> None:
        assert start_new_session
        self.args = args
        self._code: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both processes would write what is left
        ready, begun = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.close(begun)
                for target, stream in ((1, stdout), (2, stdout if stderr is None else stderr)):
                    if stream is not None:
                        os.dup2(stream if isinstance(stream, int) else stream.fileno(), target)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
                begin_anew(env)
                execute(list(args))
            finally:
                os._exit(70)
        os.close(begun)
        os.read(ready, 1)  # the launcher signals the group that the fork has made
        os.close(ready)
        with open(Fork.recorded, "a") as file:
            file.write(f"{self.pid}\n")

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(0.005)
        return code


def _begin(command: list[str], cwd: str, environment: dict[str, str], folder: str, outputs: list[str]) -> NoReturn:
    """Makes this process, a fork, what `command` would start, in `cwd`; it writes to the files `outputs`."""
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if "DSJOB_LAUNCHER" in environment:  # a rank ends with its parent, which is here the server that forks
        environment["DSJOB_LAUNCHER"] = str(os.getppid())
    os.setsid()  # after the files are open: a launcher closes its own as soon as this process leads a group
    os.chdir(cwd)
    begin_anew(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    root, tests = str(TESTS.parent), str(TESTS)
    sys.path[:] = [path for path in sys.path if path not in ("", root) and not path.startswith(tests)]
    sys.path[:] = [path for path in sys.path if path != str(Path(DSJOB).parent)]
    Fork.recorded = f"{folder}/{RANKS}"
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from dsjob.launch import comparison, supervisor
    from dsjob.programs import launch
    from dsjob.ranks import patience

    patience.TO_NOTICE, patience.TO_ANSWER, patience.TO_BE_SEEN = PATIENCE
    comparison.multiprocessing = types.SimpleNamespace(get_context=lambda _: get_context("fork"))  # type: ignore[assignment]
    supervisor.start_process = Fork
    launch.replace_process = lambda _, command: execute(command)
    subprocess_handler.Popen = Fork  # type: ignore[attr-defined, misc, assignment]
    # For its log, torchrun looks up the source of its callers, which takes it longer than all else.
    dynamic_rendezvous.get_method_name = lambda depth=2: "a method"
    execute(command)


_INSTALLED: list[str] = []


def execute(command: list[str]) -> NoReturn:
    """Ends this process as the interpreter would that `command` starts: the dsjob script, or Python with arguments."""
    _INSTALLED[:] = _INSTALLED or sys.path
    try:
        _execute(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _execute(command: list[str]) -> None:
    program, *words = command
    safe = bool(os.environ.get("PYTHONSAFEPATH"))
    while program == sys.executable and words[0] in ("-P", "-u"):
        safe |= words.pop(0) == "-P"
    if program == DSJOB:
        _place(Path(DSJOB).parent, command)
        from dsjob.cli import main

        sys.exit(main())
    assert program == sys.executable, command
    if words[0] == "-m":
        module = words[1]
        _place(None if safe else Path.cwd(), words[1:])
        if not hasattr(sys.modules.get(module), "__path__"):  # else it is a package, of which runpy runs __main__
            sys.modules.pop(module, None)  # runpy warns of a module that is imported already
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        _place(None if safe else Path(), ["-c", *words[2:]])
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        exec(compile(words[1], "<string>", "exec"), main_module.__dict__)
    else:
        _place(None if safe else Path(words[0]).absolute().parent, words)
        runpy.run_path(words[0], run_name="__main__")


def _place(folder: Path | None, arguments: list[str]) -> None:
    """The `sys.path` and `sys.argv` of a program in `folder`."""
    first = [] if folder is None else ["" if folder == Path() else str(folder)]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *given, *(path for path in _INSTALLED if path not in given)]
    sys.argv[:] = arguments
