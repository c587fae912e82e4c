"""Builds a checkpoint's model in a separate, restricted process, to compare names and shapes with its architecture.

The configuration is untrusted, and how transformers and peft handle hostile ones has not been audited. The process has
no network access, cannot start other processes, and has limits on time and memory. The hub's client is offline from the
first import on.
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

_SECONDS = 60  # of CPU time, after the imports; the largest published models take less than ten
_PATIENCE = 600  # seconds in total, including imports from a slow disk
_MEMORY = 4 << 30  # bytes, in addition to what the libraries use
_ACTS = ("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr")
_REFUSED = {f"socket.{act}" for act in _ACTS}
_REFUSED |= {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_HINT = "--to fp32 writes only the weights"


@dataclass(frozen=True)
class Question:
    """The input of the process.

    config: the content of config.json. shapes: the shapes of the tensors by their new names: in the base model, or if
    an adapter is written, in the model with adapters. adapters: (name, configuration), the one to write or merge first.
    modules: the modules to merge, by their names in the base model.
    """

    config: Mapping[str, Any]
    shapes: Shapes
    adapters: Sequence[tuple[str, Mapping[str, Any]]] = ()
    modules: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """The output of the process.

    names: peft's names for the adapter's tensors, None if unknown. transposed: whether a module stores its weight as
    [in, out], if known. alphas: see `find_alphas`. notes: messages for the user.
    """

    names: dict[str, str] | None
    transposed: dict[str, bool]
    alphas: dict[str, float]
    notes: list[str]


def list_pairs(adapters: Sequence[Adapter]) -> list[tuple[str, Mapping[str, Any]]]:
    """Adapters in the form that Question needs."""
    return [(adapter.name, adapter.config) for adapter in adapters]


def ask(question: Question) -> Answer:
    """Compares a checkpoint with its architecture, and returns what the architecture knows.

    Raises UsageError if they do not match, or if building the model exceeds the limits on time or memory.
    """
    if not question.config.get("architectures") and not any(one.get("alpha_pattern") for _, one in question.adapters):
        return Answer(None, {}, {}, ["the tensor names were not checked: the configuration names no architecture"])
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
    result = json.loads(done.stdout)
    if "refused" in result:
        raise UsageError(result["refused"], hint=result["hint"])
    return Answer(**result)


def _cannot(why: str) -> UsageError:
    return UsageError(f"building the model from the checkpoint's configuration {why}", hint=_HINT)


def main(seconds: int, memory: int) -> None:
    """The process: reads a Question from stdin, writes the fields of its Answer to stdout, as JSON."""
    question, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # send what the libraries print to stderr
    from dsjob.checkpoint.pretrained import architecture

    architecture.import_libraries()
    _limit(seconds, memory)
    sys.addaudithook(_refuse)
    try:
        result = architecture.answer(question)
    except MemoryError:
        result = _describe(_cannot(f"takes more than {memory >> 20:,} MiB"))
    except UsageError as error:
        result = _describe(error)
    with out:
        json.dump(result, out)


def _describe(error: UsageError) -> dict[str, Any]:
    return {"refused": error.message, "hint": error.hint}


def _limit(seconds: int, memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows; there, only the total time is limited
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
        raise PermissionError(f"{event} is not allowed while building a model from a configuration")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
