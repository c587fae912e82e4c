"""Runs unmodified programs on dsjob's engine or on the installed DeepSpeed, so that tests can compare what they record.

A program imports deepspeed, transformers or accelerate as its author would. It runs in a folder of its own, and rank 0
writes its records (losses, gradient norms, learning rates, metrics) there as JSON: `RECORDS`.

One process per engine imports what `forks` has not imported, which takes seconds. The ranks of each run are its forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

Engine = Literal["dsjob", "deepspeed"]
RECORDS, OUTPUT = "records.json", "output.txt"
# Transformers imports the parts of itself when they are first used.
IMPORTED = [
    "torch",
    "deepspeed",
    "accelerate",
    "transformers.trainer_seq2seq",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
]
TIMINGS = (
    "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime", "eval_samples_per_second",
    "eval_steps_per_second", "test_runtime", "test_samples_per_second", "test_steps_per_second", "total_flos",
    "eval_model_preparation_time", "test_model_preparation_time",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run of a program on `ranks` ranks, with `folder` (created if need be) as its working folder."""

    program: Path
    folder: Path
    arguments: Sequence[str] = ()
    ranks: int = 2
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 120  # seconds


def make_environment(engine: Engine) -> dict[str, str]:
    """The environment in which `import deepspeed` gives that engine, on the CPU."""
    from programs import clean_env

    from dsjob.programs.alias import stand_in

    environment = clean_env(
        CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )
    if engine == "dsjob":
        stand_in(environment)
    else:
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def run_on(engine: Engine, runs: Sequence[Run], *, imported: Sequence[str] = IMPORTED) -> list[Any]:
    """Runs programs one after the other; returns the content of `RECORDS` of each, or None if it wrote none.

    imported: modules to import before the first. Raises AssertionError with the end of a program's output if it fails.
    """
    from programs import run_program

    task = {"imported": list(imported), "runs": [asdict(run) for run in runs]}
    limit = 120 + sum(run.timeout for run in runs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task, default=str))
        command, env = [sys.executable, __file__, str(file)], make_environment(engine)
        if find_spec("deepspeed"):
            done = run_program(command, cwd=Path(folder), env=env, timeout=limit)
        else:  # accelerate in a fork was imported where there was none, and would go on without
            done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=limit, check=False)
    assert done.returncode == 0, f"{engine}: {done.stdout[-6000:]}{done.stderr[-6000:]}"
    files = [run.folder / RECORDS for run in runs]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def compare(
    ours: Any, theirs: Any, tolerance: float, *, ignored: Sequence[str] = TIMINGS, where: str = ""
) -> list[str]:
    """Where two records differ: numbers by more than `tolerance`, absolutely or relatively; all else, at all.

    ignored: keys of dicts that are not compared.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [key for key in {**ours, **theirs} if key not in ignored]
        pairs = [(f"{where}.{key}", ours.get(key), theirs.get(key)) for key in keys]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{where}[{number}]", *pair) for number, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (ours, theirs))
        bound = tolerance * max(1.0, abs(theirs)) if numbers else 0
        same = abs(ours - theirs) <= bound if numbers else ours == theirs
        return [] if same else [f"{where or 'records'}: dsjob has {ours!r}, DeepSpeed {theirs!r}"]
    found = [compare(a, b, tolerance, ignored=ignored, where=place) for place, a, b in pairs]
    return [difference for part in found for difference in part]


def _serve(task: dict[str, Any]) -> None:
    """Imports the libraries and runs each program. Ends at the first that fails, with what it has written."""
    for name in task["imported"]:
        __import__(name)
    # DeepSpeed would compile this for minutes. It only moves the data of collectives another way.
    compatible = sys.modules["deepspeed"].ops.__compatible_ops__ if "deepspeed" in sys.modules else {}
    if "deepspeed_shm_comm" in compatible:
        compatible["deepspeed_shm_comm"] = False
    for run in task["runs"]:
        folder = Path(run["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RECORDS, OUTPUT):
            (folder / name).unlink(missing_ok=True)
        began = time.monotonic()
        failed = _run_ranks(run, folder)
        if failed:
            command = f"{run['program']} {' '.join(run['arguments'])}"
            sys.exit(
                f"{failed} after {time.monotonic() - began:.0f} s: {command}\n{(folder / OUTPUT).read_text()[-8000:]}"
            )


def _run_ranks(run: dict[str, Any], folder: Path) -> str | None:
    """Forks the ranks and waits for them. Returns what went wrong, if anything; then no rank is left."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    ranks = {}
    for rank in range(run["ranks"]):
        pid = os.fork()
        if pid == 0:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run["ranks"])}
            place |= {"LOCAL_WORLD_SIZE": str(run["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            _become(run, folder, {**place, **run["env"]})
        ranks[pid] = rank
    end, failed = time.monotonic() + run["timeout"], None
    while ranks and failed is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            failed = f"rank {rank} ended with {code}" if code else None
        elif time.monotonic() > end:
            failed = "timed out"
        else:
            time.sleep(0.01)
    if ranks:
        time.sleep(0.3)  # another rank may still be writing why it failed
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


def _become(run: dict[str, Any], folder: Path, environment: dict[str, str]) -> NoReturn:
    """Makes this process a rank of the program."""
    code = 1
    try:
        gc.freeze()  # libraries often collect garbage: nothing of what was imported before
        os.environ.update(environment)
        os.chdir(folder)
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv[:] = [run["program"], *run["arguments"]]
        sys.path[0] = str(Path(run["program"]).parent)
        import torch

        torch.set_num_threads(1)
        runpy.run_path(run["program"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        os._exit(code)


if __name__ == "__main__":
    _serve(json.loads(Path(sys.argv[1]).read_text()))
