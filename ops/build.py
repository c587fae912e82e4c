"""Builds ops into a private cache, once per machine, however many processes ask for them.

A built library lies in a folder named by a hash of everything that it depends on: sources, flags, torch, compiler and
architecture. The folder appears by a rename when the build is complete, so a killed build leaves nothing that looks
finished. The lock is the kernel's and ends with its owner, unlike the lock files of `torch.utils.cpp_extension.load`,
which a killed build leaves behind for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsjob import files
from dsjob.errors import BuildError, StorageError
from dsjob.home import find_again
from dsjob.ops.registry import Op
from dsjob.ops.toolchain import (
    describe_tools,
    describe_use,
    find_problem,
    find_toolchain,
    own_architectures,
    runs_on,
)
from dsjob.terminal import print_error

PREBUILT = Path(__file__).parent / "built"  # in a wheel that was built with DSJOB_BUILD_OPS=1
_UNFINISHED = "unfinished-"
_TARGETS = "architectures"  # a file beside a wheel's library: the GPUs that it was built for
_SHOWN = 12  # lines of a compiler's output in an error


def open_cache() -> Path:
    """The folder of built ops: DSJOB_OPS_DIR, or `dsjob/ops` in the user's cache folder. Creates it.

    Raises BuildError for a folder that other users can write to.
    """
    try:
        return Path(files.open_cache("ops", "built ops", os.environ.get("DSJOB_OPS_DIR"), "DSJOB_OPS_DIR"))
    except StorageError as error:
        raise BuildError(error.message, hint=error.hint) from error


def key_of(op: Op) -> str:
    """The name of the folder that a build of `op` with this machine's tools has."""
    return _hash(op, [*describe_use(op), *describe_tools(op)])


def _hash(op: Op, parts: list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in op.files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{op.name}-{digest.hexdigest()[:16]}"


def find_built(op: Op) -> Path | None:
    """The library of `op` that fits this machine, where it has been built."""
    places = []
    # A wheel's library may come from another machine, with other compilers.
    packed = PREBUILT / _hash(op, describe_use(op))
    if (packed / _file_of(op)).is_file() and runs_on((packed / _TARGETS).read_text(), own_architectures()):
        places.append(packed)
    try:
        places.append(open_cache() / key_of(op))
    except BuildError:
        pass  # a wheel's library needs no cache
    return next((place / _file_of(op) for place in places if (place / _file_of(op)).is_file()), None)


def build_prebuilt(op: Op, folder: Path) -> Path:
    """Builds `op` below `folder`, for PREBUILT in a wheel. Raises BuildError."""
    library = build_into(op, folder, _hash(op, describe_use(op)))
    (library.parent / _TARGETS).write_text(find_toolchain().architectures if op.device == "cuda" else "")
    return library


def build(op: Op) -> Path:
    """Builds `op` unless that was done before, and returns its library. Raises BuildError."""
    built = find_built(op)
    if built is not None:
        return built
    cache, key = open_cache(), key_of(op)
    with _locked(cache / f"{key}.lock"):
        built = find_built(op)  # another process may have built it while this one waited
        if built is not None:
            return built
        takes = "some minutes" if op.device == "cuda" else "about 10 seconds"
        print_error(f"dsjob: building the native op {op.name} (once per machine, {takes})")
        return build_into(op, cache, key)


def build_into(op: Op, folder: Path, key: str) -> Path:
    """Builds `op` as `folder/key`. Raises BuildError."""
    problem = find_problem(op)
    if problem:
        raise BuildError(f"cannot build {op.name}: {problem}")
    for left in folder.glob(f"{_UNFINISHED}{key}-*"):  # by a killed build: the caller holds the lock of this key
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{key}-", dir=folder))
    try:
        _compile(op, work)
        os.replace(work / "out", folder / key)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder / key / _file_of(op)


def _compile(op: Op, work: Path) -> None:
    """Compiles in a process of its own, because setuptools changes the process it runs in."""
    command = [sys.executable, "-m", "dsjob.ops.compiling", op.device, op.name, str(work), *map(str, op.sources)]
    environment = {**os.environ, **find_again()}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        shown = "\n  ".join(_find_errors(done.stdout))
        raise BuildError(f"cannot build {op.name}: the compiler failed:\n  {shown}")


def _find_errors(output: str) -> list[str]:
    """What a failed build says is wrong: the compilers' errors, or its last lines, without those of tracebacks."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = list(dict.fromkeys(line for line in lines if "error:" in line or "nvcc fatal" in line))
    traceback = next((number for number, line in enumerate(lines) if line.startswith("Traceback ")), len(lines))
    return (errors or lines[:traceback] + lines[max(traceback, len(lines) - 1) :])[-_SHOWN:]


def _file_of(op: Op) -> str:
    return f"{op.name}.so"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock. The kernel releases it when the process ends, however it ends."""
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
