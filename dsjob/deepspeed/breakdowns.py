"""What `wall_clock_breakdown`, `memory_breakdown` and `flops_profiler` in a program's config print.

Only rank 0 measures and prints. Nothing waits for the device until a line is due.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dsjob import storage
from dsjob.callbacks.flops import make_table
from dsjob.callbacks.memory_use import GIB, MemoryMeter, read_peak
from dsjob.callbacks.wall_clock import Stopwatch
from dsjob.engine.engine import Engine
from dsjob.terminal import print_block

# DeepSpeed's names of the parts of a step: in the printed line, and behind `elapsed_time_ms_` in events for monitors.
_DEEPSPEED_NAMES = {
    "forward": ("fwd", "forward"),
    "backward": ("bwd", "backward"),
    "backward_pass": ("bwd_inner", "backward_inner"),
    "backward_rest": ("bwd_allreduce", "backward_allreduce"),
    "step": ("step", "step"),
}


class Breakdowns:
    """The breakdowns of one engine, printed each `steps_per_print` steps; without that key each step, as in DeepSpeed.

    times: milliseconds of an optimizer step by DeepSpeed's names, the mean of those since the line before.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        self.times: dict[str, float] = {}
        self._engine, self._every = engine, config.get("steps_per_print") or 1
        self._printed = engine.global_steps
        counts = (config.get("flops_profiler") or {}).get("enabled") is True
        self._profile = _FlopsProfile(engine, config["flops_profiler"]) if counts else None
        # As in DeepSpeed, the profile includes times.
        timed = config.get("wall_clock_breakdown") is True or counts
        self._stopwatch = Stopwatch(inner=("backward_pass", "backward_rest")) if timed else None
        self._meter = MemoryMeter() if config.get("memory_breakdown") is True else None
        for tool in (self._stopwatch, self._meter, self._profile):
            if tool is not None:
                tool.watch(engine)

    def end_step(self) -> list[tuple[str, float, int]]:
        """Prints what is due after an optimizer step. Returns the times as events for monitors."""
        step = self._engine.global_steps
        profiled = self._profile is not None and self._profile.due
        if step % self._every and not profiled:
            return []
        if self._stopwatch is not None:
            steps, self._printed = max(step - self._printed, 1), step
            parts = {part: 1000 * seconds / steps for part, seconds in self._stopwatch.read()[0].items()}
            self.times = {name: parts[part] for part, (name, _) in _DEEPSPEED_NAMES.items() if part in parts}
            _print_line("time (ms)", self.times)
        if self._meter is not None:
            _print_line("memory (GiB)", {kind: size / GIB for kind, size in self._read_memory().items()})
        if self._profile is not None and profiled:
            self._profile.show(self.times)
        samples = self._engine.global_samples
        events = dict(_DEEPSPEED_NAMES.values())
        return [(f"Train/Samples/elapsed_time_ms_{events[name]}", ms, samples) for name, ms in self.times.items()]

    def _read_memory(self) -> dict[str, int]:
        assert self._meter is not None
        found, device = self._meter.read(), self._engine.device
        if device.type == "cuda":
            found |= {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        return found | {"peak": read_peak(device)}


class _FlopsProfile:
    """Counts the operations of one micro batch in step `profile_step`, as the section's other keys ask for."""

    def __init__(self, engine: Engine, section: Mapping[str, Any]) -> None:
        self._engine, self._section = engine, section
        self._counted: dict[str, FlopCounterMode] = {}  # by part
        self.due = False

    def watch(self, engine: Engine) -> None:
        engine.strategy.parts.watches.append(self._count)

    @contextmanager
    def _count(self, part: str) -> Iterator[None]:
        # DeepSpeed counts steps from 0.
        now = self._engine.global_steps == self._section["profile_step"]
        if not now or part not in ("forward", "backward") or part in self._counted:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._counted[part], self.due = counter, True

    def show(self, times: Mapping[str, float]) -> None:
        """Prints the profile, or writes it to `output_file`. times: milliseconds of the parts of a step."""
        lines, file = self._describe(times), self._section.get("output_file")
        if self._section.get("detailed", True) and "forward" in self._counted:
            lines += ["", make_table(self._counted["forward"], self._section.get("module_depth", -1))]
        text = "\n".join(lines)
        if file:
            file = os.path.abspath(file)
            storage.make_folder(os.path.dirname(file))
            storage.write_bytes(file, f"{text}\n".encode())
        _print(f"flops profile: {file}" if file else text)
        self._counted, self.due = {}, False

    def _describe(self, times: Mapping[str, float]) -> list[str]:
        engine, rhythm = self._engine, self._engine.rhythm
        total, trained = engine.count_parameters()
        facts = {
            "ranks": f"{engine.world.everyone.size}, {engine.world.data_size} of them data-parallel",
            "micro batch": f"{rhythm.micro_batch} samples, {rhythm.accumulation} in a step",
            "parameters": f"{total:,}, {trained:,} of them trained",
        }
        for part, counter in self._counted.items():
            flops, passes = counter.get_total_flops(), rhythm.accumulation
            ms = times.get(_DEEPSPEED_NAMES[part][0])
            rate = f", {1000 * flops * passes / ms / 1e12:.3g} TFLOP/s in {ms / passes:.2f} ms" if ms else ""
            facts[part] = f"{flops:,} operations{rate}" if flops else "none are counted, as in compiled models"
        return [f"flops profile of step {engine.global_steps}, rank 0", *(f"  {k:<12}{v}" for k, v in facts.items())]


def _print_line(title: str, values: Mapping[str, float]) -> None:
    _print(" | ".join([title, *(f"{name}: {value:.2f}" for name, value in values.items())]))


def _print(text: str) -> None:
    print_block(text)
