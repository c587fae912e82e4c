"""Measures how long each part of training takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from dsjob.callbacks.callback import Callback, RunView
from dsjob.engine.engine import Engine

# Parts that steps consist of; the others occur now and then.
_OF_STEPS = ("data", "forward", "backward", "passes", "step")  # passes: of `run_step`
_PARTS = (*_OF_STEPS, "evaluation", "save")
_ON_DEVICE = ("forward", "backward", "backward_pass", "backward_rest", "passes", "step")


class Stopwatch:
    """Measures how long the parts of engines take, in seconds. Of parts inside others, only `inner` are measured.

    On CUDA, passes and steps are measured on the device with events, so nothing waits for it until `read`.
    """

    def __init__(self, inner: tuple[str, ...] = ()) -> None:
        self._inner = inner
        self._waiting: list[tuple[str, Callable[[], float]]] = []  # measured parts, whose seconds may be read later
        self._inside = False

    def watch(self, engine: Engine) -> None:
        """Measures the parts of `engine` from now on."""
        engine.strategy.parts.watches.append(partial(self._watch, engine.device.type == "cuda"))

    def read(self) -> tuple[dict[str, float], dict[str, int]]:
        """The seconds and the number of occurrences of each part since the last call."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for part in (*_PARTS, *self._inner):
            found = [read() for name, read in self._waiting if name == part]
            if found:
                sums[part], counts[part] = sum(found), len(found)
        self._waiting = []
        return sums, counts

    @contextmanager
    def _watch(self, cuda: bool, part: str) -> Iterator[None]:
        if self._inside and part not in self._inner:  # a pass of an evaluation, for example
            yield
            return
        before, self._inside = self._inside, True
        try:
            with _measure_on_device(self._add(part)) if cuda and part in _ON_DEVICE else _measure_here(self._add(part)):
                yield
        finally:
            self._inside = before

    def _add(self, part: str) -> Callable[[Callable[[], float]], None]:
        return lambda read: self._waiting.append((part, read))


class WallClock(Callback):
    """Measures how long reading data, forward and backward passes, optimizer steps, evaluations and saves take, on
    rank 0.

    Log records get `time/PART_ms`, the mean since the last record: per optimizer step, or per evaluation and save. They
    also get `time/PART_share`, the share of the time since the last record, from 0 to 1. `time/other_share` is the
    rest: losses, records, callbacks. In a pipeline, PART is `passes`, with their waiting, in place of forward and
    backward. At the end, the shares of the whole run are shown.

    DeepSpeed's key `wall_clock_breakdown` adds this callback.
    """

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self._totals: dict[str, float] = {}
        self._begun = self._since = self._taken = 0.0

    def on_start(self, run: RunView) -> None:
        self._begun = self._since = time.perf_counter()
        self._taken = run.step
        for engine in run.engines.values():
            self._stopwatch.watch(engine)

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        now, steps = time.perf_counter(), max(run.step - self._taken, 1)
        sums, counts = self._collect()
        passed = max(now - self._since, 1e-9)
        self._since, self._taken = now, run.step
        means = {part: sums[part] / (steps if part in _OF_STEPS else counts[part]) for part in sums}
        shares = {part: seconds / passed for part, seconds in sums.items()}
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        return {
            **{f"time/{part}_ms": 1000 * seconds for part, seconds in means.items()},
            **{f"time/{part}_share": share for part, share in shares.items()},
        }

    def on_end(self, run: RunView) -> None:
        self._collect()
        passed = max(time.perf_counter() - self._begun, 1e-9)
        shares = {part: self._totals[part] / passed for part in _PARTS if part in self._totals}
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        run.say("time", "  ".join(f"{part} {share:.0%}" for part, share in shares.items()) + f"  of {passed:.3g} s")

    def _collect(self) -> tuple[dict[str, float], dict[str, int]]:
        sums, counts = self._stopwatch.read()
        for part, seconds in sums.items():
            self._totals[part] = self._totals.get(part, 0.0) + seconds
        return sums, counts


@contextmanager
def _measure_here(add: Callable[[Callable[[], float]], None]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds = time.perf_counter() - begun
    add(lambda: seconds)


@contextmanager
def _measure_on_device(add: Callable[[Callable[[], float]], None]) -> Iterator[None]:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    yield
    ended.record()

    def read() -> float:
        if not ended.query():  # type: ignore[no-untyped-call] # a record waits for the device before this
            ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000

    add(read)
