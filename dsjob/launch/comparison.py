"""Runs one job on both engines and compares the results. Both use the same seeds and data, each in new processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from dsjob.callbacks.callback import Callback, RunView
from dsjob.callbacks.memory_use import read_peak
from dsjob.contract import schema as contract
from dsjob.contract.masked_output import watch_output
from dsjob.contract.masking import mask
from dsjob.document.resolve import complete_job
from dsjob.errors import DsjobError, Interrupted, LaunchError, UsageError, how_to_install
from dsjob.files import temporary_folder
from dsjob.launch import launcher
from dsjob.launch.rank import end_rank, end_with_parent
from dsjob.ranks import patience
from dsjob.ranks.signals import handling
from dsjob.terminal import print_traceback
from dsjob.trust.frames import describe_failure, hint_at_failure
from dsjob.trust.grant import Trust

ENGINES = ("dsjob", "deepspeed")
_NAME = "measured.json"
_ERROR = "error.json"
_SAFE_PATH = "PYTHONSAFEPATH"
_UNSAVED = {"at_end": False, "on_signal": False, "resume": "never"}
_ALONE = {"log_every": 1, "eval_every": 0, "eval_at_start": False, "loss_average": "batches"}


@dataclass(frozen=True)
class Side:
    """The measurements of one engine's run: loss and seconds of each step, and peak bytes of the largest rank.

    On a GPU, `peak_bytes` counts torch's allocations there; on the CPU, the process's resident memory.
    """

    losses: list[float]
    seconds: list[float]
    peak_bytes: int

    @property
    def seconds_per_step(self) -> float:
        """The median over steps. Leaves out the first step if there are several."""
        return statistics.median(self.seconds[1:] or self.seconds)


def compare(document: Mapping[str, Any], *, steps: int, trust: Trust, debug: bool = False) -> dict[str, Side]:
    """Trains a resolved job for `steps` steps on each engine. Evaluates and saves nothing.

    Raises UsageError if DeepSpeed is not installed, LaunchError if a side fails, Interrupted at SIGTERM.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "compare-engines needs the package deepspeed, which is not installed", hint=how_to_install("deepspeed")
        )

    def stop(number: int, _: Any) -> None:
        raise Interrupted(number)

    with handling({signal.SIGTERM: stop}):
        return _compare(document, steps, trust, debug)


def _compare(document: Mapping[str, Any], steps: int, trust: Trust, debug: bool) -> dict[str, Side]:
    sides = {}
    with temporary_folder() as folder:
        for engine in ENGINES:
            run_dir = os.path.join(folder, engine)
            os.mkdir(run_dir)
            _run_side(engine, _cut(document, engine, steps, run_dir), run_dir, trust, debug)
            with open(os.path.join(run_dir, _NAME), encoding="utf-8") as file:
                sides[engine] = Side(**json.load(file))
    return sides


def find_largest_difference(sides: Mapping[str, Side]) -> tuple[float, int]:
    """The largest difference between the losses of a step, relative to dsjob's loss, and the step. inf for nan."""
    ours, theirs = (sides[engine].losses for engine in ENGINES)
    found = [abs(b - a) / max(abs(a), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    found = [math.inf if math.isnan(each) else each for each in found]
    largest = max(found)
    return largest, found.index(largest) + 1


def _cut(document: Mapping[str, Any], engine: str, steps: int, run_dir: str) -> dict[str, Any]:
    """Reduces the job to one side of the comparison: a few steps, each logged, without evaluation or saving."""
    trainer = {
        key: value for key, value in document["trainer"].items() if key not in ("max_epochs", "max_length", "eval_step")
    }
    gauge = {"_target_": f"{__name__}.Gauge", "folder": run_dir}
    return {
        **document,
        "engine": engine,
        "data": {key: value for key, value in document["data"].items() if key != "eval"},
        "metrics": {},
        "trainer": {**trainer, **_ALONE, "max_steps": steps},
        "checkpoint": contract.fill_defaults(_UNSAVED, contract.job_schema()["properties"]["checkpoint"]),
        "callbacks": {"gauge": gauge},
        "output": {**document["output"], "dir": run_dir},
    }


def _run_side(engine: str, document: Mapping[str, Any], run_dir: str, trust: Trust, debug: bool) -> None:
    granted = replace(trust, prefixes=(*trust.prefixes, f"{__name__}.Gauge"))
    arguments = (document, run_dir, granted.to_text(), debug, os.getpid(), os.environ.get(_SAFE_PATH))
    # A new process for each side, so that one side's imports and peak memory do not affect the other's.
    process = multiprocessing.get_context("spawn").Process(target=_work, args=arguments)
    outer = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"  # like -P for a rank: modules in the current folder cannot shadow Python's own
    try:
        process.start()
    finally:
        _restore(outer)
    try:
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join(patience.TO_LEAVE)
            process.kill()
            process.join()
    if process.exitcode == 0:
        return
    told: dict[str, Any] = {"message": f"its process ended with exit code {process.exitcode}", "hint": ""}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(run_dir, _ERROR), encoding="utf-8") as file:
        told = json.load(file)
    raise LaunchError(f"engine {engine}: {told['message']}", hint=told["hint"], exit_code=told.get("exit_code", 1))


def _restore(safe_path: str | None) -> None:
    os.environ.pop(_SAFE_PATH, None)
    if safe_path is not None:
        os.environ[_SAFE_PATH] = safe_path


def _work(
    document: Mapping[str, Any], run_dir: str, trust: str, debug: bool, parent: int, safe_path: str | None
) -> None:
    """The main function of a side's process. Its output is not shown."""
    end_with_parent(parent)
    _restore(safe_path)
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with watch_output():
        _start(document, run_dir, trust, debug)


def _start(document: Mapping[str, Any], run_dir: str, trust: str, debug: bool) -> NoReturn:
    """Runs a side and ends its process. It masks secrets in errors here, because only this process knows them."""
    try:
        launcher.start(complete_job(document), run_dir, trust=Trust.from_text(trust), debug=debug)
    except KeyboardInterrupt:
        end_rank(130)
    except Exception as error:
        known = isinstance(error, DsjobError)
        record = {
            "message": mask(error.message) if isinstance(error, DsjobError) else describe_failure(error),
            "hint": mask(error.hint) if isinstance(error, DsjobError) else hint_at_failure(error),
            "exit_code": error.exit_code if isinstance(error, DsjobError) else 1,
        }
        with open(os.path.join(run_dir, _ERROR), "w", encoding="utf-8") as file:
            json.dump(record, file)
        if debug and not known:
            print_traceback(error)
        end_rank(1)
    end_rank(0)


class Gauge(Callback):
    """Measures a run that logs each step. Rank 0 writes the measurements to `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._losses: list[float] = []
        self._times: list[float] = []

    def on_start(self, run: RunView) -> None:
        self._times = [time.perf_counter()]

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self._losses.append(record["loss"])
        self._times.append(time.perf_counter())

    def on_end(self, run: RunView) -> None:
        peak = _find_peak(run)
        if run.engine.world.data_rank == 0:
            seconds = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
            with open(os.path.join(self._folder, _NAME), "w", encoding="utf-8") as file:
                json.dump({"losses": self._losses, "seconds": seconds, "peak_bytes": peak}, file)


def _find_peak(run: RunView) -> int:
    """Peak bytes of the largest rank. A collective: all ranks must call it."""
    import torch
    import torch.distributed as dist

    world = run.engine.world
    peak = torch.tensor(read_peak(world.device), device=world.device)
    if world.data_size > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)
