"""Records traces of a few steps with torch.profiler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import profiler
from torch.autograd.profiler_util import EventList

from dsjob.callbacks.callback import Callback, RunView
from dsjob.errors import ContractError

_SHOWN = 5  # rows of the table in the terminal


class Profiler(Callback):
    """Records steps with torch.profiler, on each rank of `ranks` (default: all): after `wait` steps and `warmup` steps
    that are recorded and dropped, it records `active` steps. This is done `repeat` times; 0: until the run ends.

    Each trace is the file `profile/rank-RANK-step-STEP.json.gz` in the run's folder, which https://ui.perfetto.dev
    opens. The parts of steps are named in it (data, forward, backward, step, evaluation, save). A table of the `rows`
    most expensive operators lies beside it, in a file that ends in `.txt`, and rank 0 shows its top. `memory`, `shapes`
    and `stacks` record allocations, shapes and Python stacks as well, and slow the recorded steps down.

    Raises ContractError for numbers of steps that are too small.
    """

    def __init__(
        self,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        rows: int = 30,
        ranks: Sequence[int] | None = None,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
    ) -> None:
        if min(wait, warmup, repeat) < 0 or min(active, rows) < 1:
            raise ContractError(
                f"wait is {wait}, warmup {warmup}, active {active}, repeat {repeat} and rows {rows}",
                hint="active and rows from 1 on, the others from 0 on",
            )
        self._schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._rows, self._ranks = rows, ranks
        self._options: dict[str, Any] = {"profile_memory": memory, "record_shapes": shapes, "with_stack": stacks}
        self._profile: Any = None

    def on_start(self, run: RunView) -> None:
        if self._ranks is not None and run.engine.global_rank not in self._ranks:
            return
        for engine in run.engines.values():
            engine.strategy.parts.watches.append(_label)
        self._profile = profiler.profile(
            activities=_list_activities(run),
            schedule=self._schedule,
            on_trace_ready=partial(self._write, run),
            **self._options,
        )
        self._profile.start()

    def on_step(self, run: RunView) -> None:
        if self._profile is not None:
            self._profile.step()

    def on_end(self, run: RunView) -> None:
        if self._profile is not None:
            self._profile.stop()  # which writes the trace of a cycle that has not ended
            self._profile = None

    def on_error(self, run: RunView, error: BaseException) -> None:
        if self._profile is not None:  # or no other profiler could start in this process
            self._profile.on_trace_ready = None
            self._profile.stop()
            self._profile = None

    def _write(self, run: RunView, profile: Any) -> None:
        rank, folder = run.engine.global_rank, os.path.join(run.folder, "profile")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank-{rank:05d}-step-{run.step:08d}")
        profile.export_chrome_trace(f"{path}.json.gz")
        averages = profile.key_averages()
        by = "self_device_time_total" if run.engine.device.type == "cuda" else "self_cpu_time_total"
        with open(f"{path}.txt", "w", encoding="utf-8") as file:
            file.write(averages.table(sort_by=by, row_limit=self._rows))
        if rank == 0:
            run.say("profile", f"{path}.json.gz\n{_describe_top(averages, by)}")


def _list_activities(run: RunView) -> list[profiler.ProfilerActivity]:
    on_device = [profiler.ProfilerActivity.CUDA] if run.engine.device.type == "cuda" else []
    return [profiler.ProfilerActivity.CPU, *on_device]


def _label(part: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(part)


def _describe_top(averages: EventList, by: str) -> str:
    """The operators that take the most time themselves: milliseconds, calls and name."""
    own = sorted(averages, key=lambda each: -getattr(each, by))[:_SHOWN]
    return "\n".join(f"  {getattr(each, by) / 1000:>10.3f} ms  {each.count:>6} x  {each.key}" for each in own)
