"""`dsjob exec`: runs an existing DeepSpeed program, unmodified, on dsjob's engine."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from dataclasses import replace
from typing import Any, Literal

from dsjob.cli import parse_count
from dsjob.cli.flags import REST, make_parser
from dsjob.errors import UsageError
from dsjob.launch import launcher
from dsjob.programs.launch import Program, become_rank, choose_ranks, require_engine, run_program
from dsjob.terminal import print_error, quote_path, quote_word

_TORCHRUN = "ranks on several machines are started with torchrun: torchrun --nnodes N ... -m dsjob exec PROGRAM"
_CORES = "set OMP_NUM_THREADS, or start dsjob with numactl"
_SEVERAL = ("-H", "--hostfile", "--num_nodes", "--node_rank", "--launcher", "--launcher_args", "--ssh_port")
_ELASTIC = ("--min_elastic_nodes", "--max_elastic_nodes")
# Flags of DeepSpeed's launcher that are refused, with the number of their values, and what to do instead.
_REFUSED = {
    **dict.fromkeys((*_SEVERAL, *_ELASTIC, "--venv_script"), (1, _TORCHRUN)),
    **dict.fromkeys(("--no_ssh", "--no_ssh_check", "--force_multi", "--elastic_training"), (0, _TORCHRUN)),
    "--autotuning": (1, "`dsjob plan` predicts which sizes fit"),
    "--enable_each_rank_log": (1, "logs/ in the run folder has the output of each rank but rank 0"),
    "--save_pid": (0, "leave it out"),
    "--bind_cores_to_rank": (0, _CORES),
    "--bind_core_list": (1, _CORES),
}
_ONE_MACHINE = {"--num_nodes": "1", "--node_rank": "0"}  # the values that mean this machine alone


class _Refuse(argparse.Action):
    """A flag that ends the command with what to do instead."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        flag = str(option_string)
        if _ONE_MACHINE.get(flag) != (values[0] if values else None) or not values:
            raise UsageError(f"dsjob exec has no {flag}", hint=_REFUSED[flag][1])


def main(arguments: list[str], debug: bool) -> int:
    """Runs the program to its end, as the ranks that the flags ask for. Returns its exit code."""
    args = _make_parser().parse_args(arguments)
    program = _read_program(args)
    require_engine(args.engine)
    settings: dict[str, Any] = {"engine": args.engine, "run_dir": args.run_dir, "lenient": args.lenient}
    settings["debug"] = debug or args.debug
    if launcher.read_world_size() is not None:
        _refuse_ranks(args)
        given = () if args.local_rank is None else (f"--local_rank={args.local_rank}",)  # as DeepSpeed spells it
        become_rank(replace(program, arguments=(*given, *program.arguments)), **settings)
    _tell_misplaced(args)
    ranks = choose_ranks(
        _count_ranks(args), args.include, args.exclude, address=args.master_addr, port=args.master_port
    )
    return run_program(program, ranks, **settings)


def _tell_misplaced(args: argparse.Namespace) -> None:
    """Warns about a launcher flag after the program, which the program gets, unless flags before it choose ranks."""
    if args.num_gpus is None and args.include is None and args.exclude is None:
        given = (word.partition("=")[0] for word in args.arguments)
        if flag := next((word for word in given if word in ("--num_gpus", "--include", "--exclude")), None):
            print_error(
                f"dsjob: {flag} comes after {args.program}, so the program gets it; put the launcher's flags first:"
                f" dsjob exec {flag} ... {quote_path(args.program)}"
            )


def _count_ranks(args: argparse.Namespace) -> int | None:
    """The number of ranks that the flags ask for. `accelerate launch` on one process sets no RANK: then it is 1."""
    if args.num_gpus is None and "ACCELERATE_MIXED_PRECISION" in os.environ:
        return 1
    count: int | None = args.num_gpus
    return count


def _refuse_ranks(args: argparse.Namespace) -> None:
    """Raises UsageError if flags choose ranks that another launcher has started."""
    names = ("num_gpus", "include", "exclude", "master_addr", "master_port")
    if given := next((name for name in names if getattr(args, name) is not None), None):
        raise UsageError(
            f"--{given} has no effect on ranks that another launcher has started",
            hint=f"leave --{given} out: torchrun, accelerate or srun decides",
        )


def _read_program(args: argparse.Namespace) -> Program:
    name: str = args.program
    if args.no_python:
        if args.module:
            raise UsageError("--no_python and --module exclude each other", hint="keep one of them")
        if shutil.which(name) is None:
            raise UsageError(f"cannot run {name!r}: there is no such command")
        return Program("command", name, tuple(args.arguments), local_rank=not args.no_local_rank)
    if not args.module and name.endswith((".json", ".yaml", ".yml")):
        raise UsageError(f"{name} is a document, not a program", hint=f"run a job: dsjob {quote_path(name)}")
    if not args.module and not os.path.exists(name):
        module = "/" not in name and not name.endswith(".py")
        hint = f"a module needs -m: dsjob exec -m {quote_word(name)}" if module else "give the path of a Python file"
        if re.fullmatch(r"python[\d.]*", name):
            hint = "leave out the interpreter: dsjob exec train.py; or run any command with --no_python"
        raise UsageError(f"{name} does not exist", hint=hint)
    if not args.module and os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
        raise UsageError(f"the folder {name} has no __main__.py to run", hint="give the path of a Python file")
    kind: Literal["module", "file"] = "module" if args.module else "file"
    return Program(kind, name, tuple(args.arguments), local_rank=not args.no_local_rank)


def _make_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "exec",
        "Run an existing DeepSpeed program, unmodified, on dsjob's engine: in this program and the processes that it"
        " starts, `import deepspeed` gives dsjob's. Flags before the program are the launcher's, all others are the"
        " program's. Under torchrun, accelerate launch, srun or mpirun, no ranks are started.",
        (
            "dsjob exec train.py --deepspeed ds_config.json",
            "dsjob exec --num_gpus 2 train.py --deepspeed ds_config.json",
            "dsjob exec --include localhost:0,2 -m my_package.train",
            "dsjob exec --engine deepspeed train.py",
            "torchrun --nproc-per-node 2 -m dsjob exec train.py",
        ),
        usage="dsjob exec [flags] PROGRAM.py [ARGUMENT ...]\n       dsjob exec [flags] -m MODULE [ARGUMENT ...]",
        allow_abbrev=False,
    )
    parser.add_argument("program", metavar="PROGRAM", help="a file of Python; with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar=REST, help="the program's own arguments")
    _add_launcher_flags(parser)
    own = parser.add_argument_group("flags of dsjob")
    own.add_argument(
        "--engine",
        choices=("dsjob", "deepspeed"),
        default="dsjob",
        help="deepspeed: run the installed DeepSpeed instead, to compare (default: dsjob)",
    )
    own.add_argument("--run-dir", metavar="DIR", help="the run folder (default: outputs/PROGRAM/TIME)")
    own.add_argument("--lenient", action="store_true", help="unknown keys of a DeepSpeed config are only warnings")
    own.add_argument("--debug", action="store_true", help="show the frames of dsjob in tracebacks")
    return parser


def _add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("flags of DeepSpeed's launcher")
    flags.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as for `python -m`")
    flags.add_argument("--no_python", action="store_true", help="PROGRAM is any command, run as it is")
    flags.add_argument(
        "--num_gpus",
        "--num_accelerators",
        "--nproc",
        type=parse_count,
        metavar="N",
        help="ranks to start (default: one for each visible GPU, otherwise 1)",
    )
    slots = "localhost:0,2 (numbers as in nvidia-smi)"
    flags.add_argument("-i", "--include", metavar="GPUS", help=f"the GPUs to use, one rank each: {slots}")
    flags.add_argument("-e", "--exclude", metavar="GPUS", help=f"GPUs not to use: {slots}")
    flags.add_argument("--master_addr", metavar="ADDRESS", help="where ranks find each other (default: 127.0.0.1)")
    flags.add_argument("--master_port", type=parse_count, metavar="PORT", help="(default: a free port)")
    flags.add_argument(
        "--no_local_rank", action="store_true", help="do not add --local_rank=N to the program's arguments"
    )
    flags.add_argument("--log_level", metavar="LEVEL", help="has no effect")
    flags.add_argument("-q", "--quiet", action="store_true", help="has no effect")
    flags.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    for flag, (values, _) in _REFUSED.items():
        flags.add_argument(flag, action=_Refuse, nargs=values or 0, help=argparse.SUPPRESS)
