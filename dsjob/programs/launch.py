"""Starts the ranks of an existing program, or becomes one of those that torchrun, accelerate or srun started."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Literal, NoReturn

from dsjob.errors import DsjobError, UsageError, how_to_install
from dsjob.files import temporary_folder
from dsjob.home import find_again
from dsjob.launch import devices, launcher
from dsjob.launch.rank import DEBUG_VARIABLE, tell_program
from dsjob.launch.supervisor import Supervisor
from dsjob.launch.surroundings import list_variables, make_logs, touching_save_request
from dsjob.programs import folder, rank
from dsjob.programs.alias import STAND_IN, leave_out, stand_in
from dsjob.ranks.loopback import is_loopback
from dsjob.run_folder import marking_running
from dsjob.terminal import print_error, print_lines

replace_process = os.execv
_TIMEOUT, _GRACE = 1800.0, 60.0  # seconds, as in the schema of `launch`
_MOST_RANKS = 1024  # as in the schema of `launch`


@dataclass(frozen=True)
class Program:
    """What to run: a file of Python, a module (`python -m`) or any command, with its arguments.

    local_rank: `--local_rank=N` comes first among the arguments, as with DeepSpeed's launcher.
    """

    kind: Literal["file", "module", "command"]
    name: str
    arguments: tuple[str, ...] = ()
    local_rank: bool = True

    def make_command(self, *, local_rank: bool) -> list[str]:
        """The command of a rank. -P keeps the current folder off sys.path, where modules would shadow installed ones;
        -u keeps the last output of a rank that is killed."""
        how = (self.kind, "1" if local_rank else "0")
        return [sys.executable, "-u", "-P", "-m", rank.__name__, *how, self.name, *self.arguments]


@dataclass(frozen=True)
class Ranks:
    """How many ranks to start, and on what. gpus: their numbers on this machine; None leaves all that are visible.

    port: where ranks find each other; None takes a free one.
    """

    count: int
    gpus: tuple[int, ...] | None
    address: str
    port: int | None


def choose_ranks(
    count: int | None, include: str | None, exclude: str | None, *, address: str | None = None, port: int | None = None
) -> Ranks:
    """The number of ranks and their GPUs. Without any argument: one rank for each visible GPU, else one.

    Raises UsageError, also if `port` is in use.
    """
    place = (address or "127.0.0.1", port)
    if port is not None:
        _require_free_port(place[0], port)
    if include is not None or exclude is not None:
        if count is not None:
            raise UsageError("--num_gpus excludes --include and --exclude", hint="these also say how many GPUs to use")
        if devices.VISIBLE in os.environ:
            told = f"ignoring {devices.VISIBLE}={os.environ[devices.VISIBLE]}: --include and --exclude name GPUs"
            print_error(f"dsjob exec: {told} of the whole machine")
        gpus = devices.choose_gpus(include, exclude, devices.count_gpus(), "--{}")
        return Ranks(len(gpus), tuple(gpus), *place)
    visible = devices.count_visible()
    if count is not None and 0 < visible < count:
        shown = "1 GPU is" if visible == 1 else f"{visible} GPUs are"
        raise UsageError(f"--num_gpus {count}, but {shown} visible")
    if count is not None and count > _MOST_RANKS:
        raise UsageError(f"--num_gpus {count} is more than {_MOST_RANKS:,}, the most ranks of one machine")
    return Ranks(count or visible or 1, None, *place)


def run_program(
    program: Program, ranks: Ranks, *, engine: str, run_dir: str | None, lenient: bool = False, debug: bool = False
) -> int:
    """Runs a program to its end, on ranks of its own. Returns its exit code.

    engine: "dsjob", or "deepspeed" for the installed DeepSpeed. Raises UsageError, LaunchError if a rank fails, and
    Preempted or Interrupted if a signal ended it.
    """
    where = folder.create(program.name, run_dir)
    command = program.make_command(local_rank=program.local_rank)
    words = [program.name, *program.arguments]
    folder.describe(where, words, engine, ranks.count)
    _tell_beginning(program, ranks.count, where)
    began = time.monotonic()
    try:
        with temporary_folder() as private:
            variables = {**list_variables(private, ranks.count, debug), **_list_own(engine, where, lenient)}
            variables.update(_locate(ranks))
            supervisor = Supervisor(private, make_logs(where), _TIMEOUT, _GRACE, own_exits=True)
            with touching_save_request(where), marking_running(where):
                supervisor.run(command, variables, ranks.count)
    except DsjobError as error:
        folder.conclude(where, error.exit_code, error.message, time.monotonic() - began)
        raise
    folder.conclude(where, 0, "", time.monotonic() - began)
    return 0


def become_rank(
    program: Program, *, engine: str, run_dir: str | None, lenient: bool = False, debug: bool = False
) -> NoReturn:
    """Replaces this process, a rank that another launcher has started, by one that runs the program."""
    where = ""
    if launcher.is_first():
        where, count = folder.create(program.name, run_dir), launcher.read_world_size() or 1
        folder.describe(where, [program.name, *program.arguments], engine, count)
        _tell_beginning(program, count, where)
    os.environ.update(_list_own(engine, where, lenient), **{DEBUG_VARIABLE: "1" if debug else ""})
    command = program.make_command(local_rank=False)
    tell_program()
    sys.stdout.flush()
    replace_process(command[0], command)


def _tell_beginning(program: Program, ranks: int, run_dir: str) -> None:
    shown = f"{ranks} rank{'s' * (ranks > 1)}"
    print_lines(f"dsjob exec: {program.name} on {shown}, run folder {run_dir}", file=sys.stderr)


def require_engine(engine: str) -> None:
    """Raises UsageError if the engine is DeepSpeed's own and DeepSpeed is not installed."""
    if engine != "deepspeed":
        return
    # A program that `dsjob exec` runs may start this one.
    found = PathFinder.find_spec("deepspeed", [folder for folder in sys.path if folder != STAND_IN])
    if found is None or found.origin is None:  # a folder of this name is no package
        raise UsageError(
            "--engine deepspeed needs the package deepspeed, which is not installed",
            hint=how_to_install("deepspeed"),
        )


def _list_own(engine: str, run_dir: str, lenient: bool) -> dict[str, str]:
    """The environment variables of ranks that run a program, whoever starts them."""
    found = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **find_again()}
    (stand_in if engine == "dsjob" else leave_out)(found)
    return {
        **found,
        rank.RUN_VARIABLE: os.path.abspath(run_dir) if run_dir else "",
        rank.LENIENT_VARIABLE: "1" if lenient else "",
    }


def _locate(ranks: Ranks) -> dict[str, str]:
    """Where the ranks find each other, and the GPUs that they see."""
    port = ranks.port or _find_free_port()
    found = {"MASTER_ADDR": ranks.address, "MASTER_PORT": str(port)}
    return found if ranks.gpus is None else {**found, **devices.make_visible(ranks.gpus)}


def _require_free_port(address: str, port: int) -> None:
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
        try:
            found.bind(("127.0.0.1" if is_loopback(address) else "", port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"--master_port {port} cannot be used: {error}", hint="leave it out, and a free port is chosen"
            ) from error


def _find_free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
