"""The run folder of a program: what was run, in which environment, and how it ended.

`program.json` has the command line and the environment, with *** in place of secrets; `result.json` says how it ended.
The ranks add `deepspeed.json` and `metrics.jsonl` (`dsjob.programs.recording`), and `logs/`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import dsjob
from dsjob import storage
from dsjob.contract.environment import HARMLESS
from dsjob.contract.secrets import hide_secrets, is_secret, redact
from dsjob.errors import Preempted
from dsjob.run_folder import make_run_dir, write_result

PROGRAM_NAME = "program.json"
_PATTERN = "outputs/%name/%time"  # the default of `output.dir`
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "trl", "peft")
# Variables of launchers and libraries that change how a program trains. Others are listed without their value.
_SHOWN = re.compile(
    r"(ACCELERATE|CUBLAS|CUDA|DEEPSPEED|DS|GLOO|HF|MASTER|MKL|NCCL|OMP|PYTHON|PYTORCH|SLURM|TOKENIZERS|TORCH"
    r"|TORCHELASTIC|TORCHINDUCTOR|TRANSFORMERS|TRITON)_?[A-Z0-9_]*|LOCAL_SIZE|PATH|VIRTUAL_ENV"
)


def create(program: str, run_dir: str | None) -> str:
    """Creates the run folder: `run_dir`, or `outputs/NAME/TIME` for the program NAME. Returns its path."""
    name = os.path.basename(program.rstrip("/")).removesuffix(".py") or "program"
    return make_run_dir(run_dir or _PATTERN, name)


def describe(run_dir: str, words: Sequence[str], engine: str, ranks: int) -> None:
    """Writes program.json. words: the program and its arguments."""
    about = {
        "command": hide_words(words),
        "folder": os.getcwd(),
        "engine": engine,
        "ranks": ranks,
        "versions": {"dsjob": dsjob.__version__, "python": sys.version.split()[0], **_list_versions(engine)},
        "environment": _show_environment(),
    }
    storage.write_bytes(os.path.join(run_dir, PROGRAM_NAME), json.dumps(about, indent=2).encode() + b"\n")


def conclude(run_dir: str, code: int, message: str, seconds: float) -> None:
    """Writes result.json: the exit code, why if it is not 0, and the seconds since the program began."""
    stopped = code in (Preempted.exit_code, 130, 143)
    status = "stopped" if stopped else "failed" if code else "done"
    told = {"error": message} if code else {}
    write_result(run_dir, {"status": status, "exit_code": code, "seconds": round(seconds, 1), **told})


def hide_words(words: Sequence[str]) -> list[str]:
    """A command line with *** in place of the values of flags that are named like secrets, and of those in URLs."""
    shown, hidden = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and is_secret(name.lstrip("-"))
        shown.append("***" if hidden else f"{name}=***" if secret and equals else redact(word))
        hidden = secret and not equals
    return shown


def _list_versions(engine: str) -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        if package != "deepspeed" or engine == package:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
    return found


def _show_environment() -> dict[str, str]:
    names = [name for name in os.environ if name in HARMLESS or _SHOWN.fullmatch(name)]
    shown = hide_secrets({name: redact(os.environ[name]) for name in names})
    return {name: shown.get(name, "***") for name in sorted(os.environ)}
