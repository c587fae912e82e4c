"""Counts floating-point operations, and compares their rate with the device's peak."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from dsjob import storage
from dsjob.callbacks.callback import Callback, RunView
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError
from dsjob.terminal import make_printable

# Dense peaks in TFLOP/s of bf16 and fp16 with fp32 accumulation, from the vendors' data sheets. The first name that is
# part of the device's name counts.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GH200": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,  # of one of its two dies, which is a device
}


class Flops(Callback):
    """Adds to log records `tflops`, the floating-point operations of one rank in TFLOP/s of training time, and on GPUs
    `mfu`, their share of the device's peak.

    by: `counting`: torch's flop counter counts the operators of one micro batch, in step `step` of each start, over all
    models. With activation checkpointing, this includes what is recomputed. Operators that torch has no formula
    for count as 0. `parameters`: 6 * trained parameters * tokens, or * samples where batches have no tokens.

    peak_tflops: of the device; by default that of bf16 and fp16 from a table of common GPUs. fp32 has no default, since
    its peak depends on TF32. The counted forward pass by modules is in `flops.txt` in the run's folder. depth: also
    show it, for modules of this depth; -1: of any depth.

    DeepSpeed's section `flops_profiler` adds this callback. Raises ContractError for invalid arguments.
    """

    def __init__(
        self,
        by: Literal["counting", "parameters"] = "counting",
        step: int = 2,
        peak_tflops: float | None = None,
        depth: int | None = None,
    ) -> None:
        if by not in ("counting", "parameters"):
            raise ContractError(f"by is {by!r}", hint="write counting or parameters")
        if step < 1 or (peak_tflops is not None and peak_tflops <= 0):
            raise ContractError(
                f"step is {step} and peak_tflops is {peak_tflops}", hint="step from 1 on, peak_tflops above 0"
            )
        self._by, self._step, self._peak = by, step, peak_tflops
        self._depth = depth
        self._begun = 0
        self._flops = 0.0  # of one micro batch on this rank, by counting
        self._counts = self._told = False
        self._shown: set[str] = set()  # models

    def on_start(self, run: RunView) -> None:
        self._begun, self._counts = run.step, self._step == 1
        if self._peak is None:
            self._peak = _find_peak(run)
        for name, engine in run.engines.items() if self._by == "counting" else ():
            engine.strategy.parts.watches.append(partial(self._count, run, name, engine))

    def on_step(self, run: RunView) -> None:
        self._counts = run.step - self._begun == self._step - 1

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        tflops = self._measure(run, record) / 1e12
        if tflops == 0:
            self._tell_nothing(run)
            return {}
        return {"tflops": tflops, **({"mfu": tflops / self._peak} if self._peak else {})}

    def _measure(self, run: RunView, record: Mapping[str, float]) -> float:
        """Floating-point operations of this rank in a second of training."""
        world, rhythm = run.engine.world, run.engine.rhythm
        samples = record["samples_per_second"]
        if self._by == "parameters":
            trained = sum(engine.count_parameters()[1] for engine in run.engines.values())
            return 6 * trained * (record.get("tokens_per_second") or samples) / world.everyone.size
        return self._flops * samples / (rhythm.micro_batch * world.data_size)

    def _tell_nothing(self, run: RunView) -> None:
        if not self._told and self._by == "counting" and run.step - self._begun >= self._step:
            self._told = True
            run.say(
                "note",
                "no floating-point operations were counted, as in compiled models and pipelines; set by: parameters",
            )

    @contextmanager
    def _count(self, run: RunView, name: str, engine: Engine, part: str) -> Iterator[None]:
        if part not in ("forward", "backward") or not self._counts or engine.rhythm.done:
            yield
            return
        counter = FlopCounterMode(display=False)
        with counter:
            yield
        self._flops += counter.get_total_flops()
        if part == "forward" and name not in self._shown and run.engine.global_rank == 0:
            self._show(run, name, counter)

    def _show(self, run: RunView, name: str, counter: FlopCounterMode) -> None:
        title = f"forward pass of {name}" if len(run.engines) > 1 else "forward pass"
        file = os.path.join(run.folder, f"flops-{name}.txt" if len(run.engines) > 1 else "flops.txt")
        storage.write_bytes(file, f"{make_table(counter, -1)}\n".encode())
        self._shown.add(name)
        if self._depth is not None:
            run.say(title, make_table(counter, self._depth))


def make_table(counter: FlopCounterMode, depth: int) -> str:
    """The operations of each module and of its operators. depth: of modules inside modules; -1 is all.

    Not torch's own table, which needs a package that torch does not install.
    """
    # The class of a sharded model is a subclass that FSDP2 has named FSDP...
    found_in = {name.removeprefix("FSDP"): found for name, found in counter.get_flop_counts().items()}
    counts = {name: found for name, found in found_in.items() if name != "Global"}
    total = counter.get_total_flops() or 1
    lines = [("module", "operations", "share")]
    for name in sorted(counts):
        if depth != -1 and name.count(".") >= depth:
            continue
        found = counts[name]
        lines.append((make_printable(name), f"{sum(found.values()):,}", f"{sum(found.values()) / total:.1%}"))
        lines += [(f"  {operator}", f"{flops:,}", f"{flops / total:.1%}") for operator, flops in found.items()]
    width, digits = (max(len(line[column]) for line in lines) for column in (0, 1))
    return "\n".join(f"{name:<{width}}  {flops:>{digits}}  {share:>6}" for name, flops, share in lines)


def _find_peak(run: RunView) -> float | None:
    """The peak of this rank's device in TFLOP/s; None if it is unknown."""
    precision, device = run.engine.precision, run.engine.device
    if device.type != "cuda" or (precision.autocast or precision.compute) not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)
