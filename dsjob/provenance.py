"""What a run was run with: Python, packages, the project's git state, host and environment variables.

`environment.jsonl` in a run's folder has one line for each attempt. git can take seconds in a large repository, so a
thread reads all this while training starts.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from dsjob.contract.environment import HARMLESS
from dsjob.contract.masking import MIN_MASKED, mask_texts
from dsjob.contract.secrets import hide_secrets, is_secret, redact
from dsjob.errors import StorageError
from dsjob.files import append_bytes, open_read, read_lines_backwards

ENVIRONMENT_NAME = "environment.jsonl"
_LONGEST_DIFF = 64 << 10  # bytes
_LONGEST_LINE = 1000  # characters of a line of a diff; those of data files can be far longer
_GIT_SECONDS = 5.0  # for each command
# Variables of launchers and libraries that change how a program trains. Others are listed without their value.
_SHOWN = re.compile(
    r"(ACCELERATE|CUBLAS|CUDA|DEEPSPEED|DS|GLOO|HF|MASTER|MKL|NCCL|OMP|PYTHON|PYTORCH|SLURM|TOKENIZERS|TORCH"
    r"|TORCHELASTIC|TORCHINDUCTOR|TRANSFORMERS|TRITON)_?[A-Z0-9_]*|LOCAL_SIZE|PATH|VIRTUAL_ENV"
)
# Variables that differ between attempts and change nothing: names of folders, files, jobs and ranks. PYTHONPATH is not
# among them: it decides which code runs.
_OF_PLACE = re.compile(
    r"(.+_)?(CACHE|DIR|FILE|FOLDER|HOME|PATH|ROOT)|PYTHON(HISTORY|HOME|PYCACHEPREFIX)|VIRTUAL_ENV"
    r"|(DSJOB|MASTER|SLURM|TORCHELASTIC)_.+"
)
# Files that usually hold secrets. Their changes are left out.
_PRIVATE_FILES = (".env*", "*.pem", "*.key", "*.p12", "id_*", ".netrc", ".npmrc", ".pypirc", "*secret*", "*credential*")
_ASSIGNED = re.compile(r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)[\"']?\s*(?::\s*\w+\s*=|[:=])")
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# Tokens of GitHub, Hugging Face, OpenAI, Slack, GitLab, AWS and Google, which are known by how they begin.
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|glpat-[\w-]{16,}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,})"
)


class Recording:
    """Reads the surroundings of this process in a thread. more: returns what the record has besides."""

    def __init__(self, more: Callable[[], Mapping[str, Any]]) -> None:
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._read, args=(more,), daemon=True, name="dsjob-provenance")
        self._thread.start()

    def _read(self, more: Callable[[], Mapping[str, Any]]) -> None:
        for part in (describe, more):
            with suppress(Exception):  # what cannot be read must not end a run
                self._found.update(part())

    def take(self, *, wait: bool) -> dict[str, Any] | None:
        """The record; None if it is not complete. wait: for as long as git may take."""
        self._thread.join(3 * _GIT_SECONDS if wait else 0)
        return None if self._thread.is_alive() else self._found


def append(run_dir: str, record: Mapping[str, Any]) -> None:
    """Appends an attempt's record to a run's `environment.jsonl`. Raises StorageError."""
    append_bytes(os.path.join(run_dir, ENVIRONMENT_NAME), json.dumps(mask_texts(record)).encode() + b"\n")


def read(run_dir: str) -> dict[str, Any]:
    """The record of a run's last attempt; empty if there is none."""
    path = os.path.join(run_dir, ENVIRONMENT_NAME)
    if not os.path.lexists(path):
        return {}
    with suppress(StorageError), open_read(path) as file:
        for _, line in read_lines_backwards(file):
            with suppress(ValueError, RecursionError):  # a line that a kill has truncated
                record = json.loads(line)
                if isinstance(record, dict):
                    return record
    return {}


def describe() -> dict[str, Any]:
    """Python, packages, host, git and environment variables of this process, with *** in place of secrets.

    git: of the repository that the current folder is in.
    """
    system = os.uname()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "folder": os.getcwd(),
        "python": sys.version.split()[0],
        "host": {
            "name": socket.gethostname(),
            "system": f"{system.sysname} {system.release} {system.machine}",
            "cpus": len(os.sched_getaffinity(0)),
        },
        "git": describe_git("."),
        "packages": list_packages(),
        "variables": _show_variables(),
    }


def list_packages() -> dict[str, str]:
    """The versions of installed packages by name, read from the names of their folders: reading each package's
    metadata would take a hundred times as long."""
    found = dict[str, str]()
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                package, dash, version = name.removesuffix(".dist-info").partition("-")
                if dash and name.endswith(".dist-info"):
                    found.setdefault(package.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def _show_variables() -> dict[str, str]:
    names = [name for name in os.environ if name in HARMLESS or _SHOWN.fullmatch(name)]
    shown = hide_secrets({name: redact(os.environ[name]) for name in names})
    return {name: shown.get(name, "***") for name in sorted(os.environ)}


def describe_git(folder: str) -> dict[str, Any] | None:
    """Commit, branch and uncommitted changes of the git repository that `folder` is in; None if it is in none.

    The changes are those of files that git knows, without secrets, and at most 64 KiB.
    """
    commit = _run_git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return None
    private = [f":(top,exclude,icase,glob)**/{pattern}" for pattern in _PRIVATE_FILES]
    changes = _run_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ":/", *private)
    diff = hide_in_text(changes[:_LONGEST_DIFF])
    return {
        "commit": commit,
        "branch": _run_git(folder, "branch", "--show-current").strip(),
        "changed": bool(diff),
        "diff": diff,
        **({"diff_truncated": True} if len(changes) > _LONGEST_DIFF else {}),
    }


def _run_git(folder: str, *words: str) -> str:
    """What git prints, up to a little more than is kept; empty if it fails or takes too long."""
    # Neither hooks nor a lock: another git may be at work. No request to a server for what a partial clone lacks.
    command = ["git", "-c", "core.fsmonitor=false", "-C", folder, *words]
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, env={**os.environ, **quiet}, start_new_session=True, **streams)
    except OSError:  # git is not installed
        return ""
    ending = threading.Timer(_GIT_SECONDS, process.kill)
    ending.daemon = True
    ending.start()
    try:
        with process:
            text: bytes = process.stdout.read(_LONGEST_DIFF + 1) if process.stdout else b""
            if len(text) > _LONGEST_DIFF:
                process.kill()  # nobody reads the rest
        complete = process.returncode == 0 or len(text) > _LONGEST_DIFF
    finally:
        ending.cancel()
    return text.decode(errors="replace") if complete else ""


def hide_in_text(text: str) -> str:
    """A text of lines with *** in place of what looks like a secret: values that are assigned to names of secrets,
    private keys, well-known tokens, credentials in URLs, and values of secret environment variables."""
    for name, value in os.environ.items():
        if is_secret(name) and len(value) >= MIN_MASKED:
            text = text.replace(value, "***")
    # The patterns below take quadratic time on very long lines.
    text = "\n".join(_shorten(line) for line in text.split("\n"))
    text = _TOKEN.sub("***", _KEY_BLOCK.sub("***", text))
    return "\n".join(map(_hide_assigned, redact(text).split("\n")))


def _shorten(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..."


def _hide_assigned(line: str) -> str:
    for found in _ASSIGNED.finditer(line):
        if is_secret(found["name"].rpartition(".")[2]):
            return f"{line[: found.end()]} ***"
    return line


def list_differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two records, by dotted path, and may change how a program trains or how fast it is."""
    leaves = [dict(_list_leaves(record)) for record in (first, second)]
    paths = dict.fromkeys([*leaves[0], *leaves[1]])
    pairs = {path: (leaves[0].get(path), leaves[1].get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1] and "***" not in pair}


def _list_leaves(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        path = f"{above}{key}"
        if path in ("time", "folder") or (above == "variables." and not _matters(key)):
            continue
        if isinstance(value, dict):
            yield from _list_leaves(value, f"{path}.")
        else:
            yield path, value


def _matters(variable: str) -> bool:
    """Whether an environment variable is more than the name of a place, user, job or rank."""
    return variable == "OMP_NUM_THREADS" or not (variable in HARMLESS or _OF_PLACE.fullmatch(variable))
