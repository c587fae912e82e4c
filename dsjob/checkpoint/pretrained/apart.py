"""Asks a process of its own about a checkpoint's architecture: what a configuration describes is built there alone.

A configuration may come from anybody, and what transformers and peft make of it nobody has checked. The process has no
network, starts no other, and has little time and memory. The hub's client is offline in it from its first import on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsjob.checkpoint.pretrained.adapters import Adapter, Shapes
from dsjob.errors import UsageError
from dsjob.home import find_again

_SECONDS = 60  # of CPU time, after the imports: the largest models that are published take less than ten
_PATIENCE = 600  # seconds in all, with imports from a slow disk
_MEMORY = 4 << 30  # bytes beyond those that the libraries take
_ACTS = ("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr")  # of sockets
_REFUSED = {f"socket.{act}" for act in _ACTS}
_REFUSED |= {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_HINT = "--to fp32 writes the weights alone"


@dataclass(frozen=True)
class Question:
    """config: of config.json; shapes: of the tensors by the names that they are to have, in the base model or, for an
    adapter that is to be written, in the model with adapters; adapters: that one first, as (name, configuration);
    modules: those that are merged, by their names in the base model."""

    config: Mapping[str, Any]
    shapes: Shapes
    adapters: Sequence[tuple[str, Mapping[str, Any]]] = ()
    modules: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """names: those that peft saves an adapter's tensors by, None where they are not known; transposed: whether a module
    keeps its weight as [in, out], where that is known; alphas: see `find_alphas`; notes: what to tell."""

    names: dict[str, str] | None
    transposed: dict[str, bool]
    alphas: dict[str, float]
    notes: list[str]


def list_pairs(adapters: Sequence[Adapter]) -> list[tuple[str, Mapping[str, Any]]]:
    """Adapters as a question has them."""
    return [(adapter.name, adapter.config) for adapter in adapters]


def ask(question: Question) -> Answer:
    """Whether a checkpoint fits its architecture, and what that knows.

    Raises UsageError where it does not fit, or where its configuration takes more time or memory than any model does.
    """
    if not question.config.get("architectures") and not any(one.get("alpha_pattern") for _, one in question.adapters):
        return Answer(None, {}, {}, ["the names of the tensors are not compared with an architecture: none is named"])
    environment = {**os.environ, **find_again(), **_OFFLINE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", __name__, str(_SECONDS), str(_MEMORY)]
    text = json.dumps(asdict(question)).encode()
    try:
        done = subprocess.run(command, input=text, capture_output=True, env=environment, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise _cannot(f"takes more than {_PATIENCE} s") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _cannot(f"takes more than {_SECONDS} s of CPU time, or the machine is out of memory")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _cannot(f"failed with exit code {done.returncode}: {last[:300]!a}")
    told = json.loads(done.stdout)
    if "refused" in told:
        raise UsageError(told["refused"], hint=told["hint"])
    return Answer(**told)


def _cannot(why: str) -> UsageError:
    return UsageError(f"building the model that the checkpoint's configuration describes {why}", hint=_HINT)


def main(seconds: int, memory: int) -> None:
    """In the process: reads a question, writes the fields of its answer."""
    question, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    from dsjob.checkpoint.pretrained import architecture

    architecture.import_libraries()
    _limit(seconds, memory)
    sys.addaudithook(_refuse)
    try:
        told = architecture.answer(question)
    except MemoryError:
        told = _describe(_cannot(f"takes more than {memory >> 20:,} MiB"))
    except UsageError as error:
        told = _describe(error)
    with out:
        json.dump(told, out)


def _describe(error: UsageError) -> dict[str, Any]:
    return {"refused": error.message, "hint": error.hint}


def _limit(seconds: int, memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows, where the time is bounded alone
        return
    resource.setrlimit(resource.RLIMIT_CPU, _lower(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + 1 + seconds))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory))


def _lower(kind: int, wanted: int) -> tuple[int, int]:
    import resource

    hard = resource.getrlimit(kind)[1]
    least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    return least, least


def _refuse(event: str, _: object) -> None:
    if event in _REFUSED:
        raise PermissionError(f"{event} is refused while a model is built of a configuration")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
