"""Compares a step of dsjob's CPU kernels to torch's fused optimizers, DeepSpeed's CPU optimizers and memory itself.

    python -m benchmarks.cpu_optimizers [--rounds 15] [--json benchmarks/results/cpu_optimizers.json]

The sides take turns in one process with all cores, and step the same memory, since a step's speed depends on where its
pages are. Every few rounds, they get new memory. Before each turn, that memory is evicted from the caches, as the
passes of a training step do: otherwise a side that follows another would find it there. Each side steps twice: `cold`,
and `warm`, which matters for what fits into the caches. Times are medians over the rounds; a ratio is the median over
rounds of dsjob's time divided by the other's. `memory` moves as many bytes as the step has to, by products in place.
Its ratio is the fraction of the bandwidth that dsjob reaches, which should be at least 0.85 where the state exceeds the
caches. Lamb needs the norms of whole parameters before it can change them, so it reads weights and averages twice; it
has no rival on the CPU. DeepSpeed's optimizers are compiled when they are first used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.ops import cpu_optimizers as kernels

SIZES = (10**6, 10**7, 10**8)
PARTS = (1, 100)  # parameters that the elements are divided into
CACHES = 128 << 20  # bytes, more than the caches of this machine's cores
PLACED = 3  # rounds with the same memory
OPTIMIZERS = ("adamw", "lion", "adagrad", "lamb")
Step = Callable[[], Any]


class Job:
    """Parameters with gradients, and the state of an optimizer: the same memory for all sides, since a step's speed
    depends on where its pages are."""

    def __init__(self, name: str, elements: int, parts: int) -> None:
        self.name = name
        kept = 2 if name in ("adamw", "lamb") else 1
        self._weights, self._gradients = torch.randn(elements), torch.randn(elements)
        self._averages = [torch.zeros(elements) for _ in range(kept)]
        self.weights, self.gradients, self.first, *second = (
            list(tensor.chunk(parts)) for tensor in (self._weights, self._gradients, *self._averages)
        )
        self.second = second[0] if second else []
        self.parameters = [nn.Parameter(weight) for weight in self.weights]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def step_ours(self) -> None:
        memory, count = (self.weights, self.gradients, self.first), len(self.weights)
        if self.name == "adamw":
            options: dict[str, Any] = {"rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.01}
            kernels.adam_(*memory, self.second, [1.0] * count, **options)
        elif self.name == "lion":
            kernels.lion_(*memory, rate=1e-3, betas=(0.9, 0.99), decay=0.01)
        elif self.name == "adagrad":
            kernels.adagrad_(*memory, [1e-3] * count, eps=1e-10, decay=0.01)
        else:
            form: dict[str, Any] = {"eps": 1e-8, "eps_inside_root": False, "decay": 0.01}
            kernels.lamb_average_(*memory, self.second, betas=(0.9, 0.999), **form)
            kernels.lamb_apply_(self.weights, self.first, self.second, [1e-3] * count, **form)

    def make_torch(self) -> Step | None:
        kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
        return self._make(kinds[self.name], fused=True) if self.name in kinds else None

    def make_deepspeed(self) -> Step | None:
        try:
            from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.lion import DeepSpeedCPULion
        except ImportError:
            return None
        kinds: dict[str, Any] = {"adamw": DeepSpeedCPUAdam, "lion": DeepSpeedCPULion, "adagrad": DeepSpeedCPUAdagrad}
        return self._make(kinds[self.name]) if self.name in kinds else None

    def _make(self, kind: Any, **options: Any) -> Step:
        """The step of another library's optimizer, whose own state is exchanged for this memory."""
        optimizer = kind(self.parameters, lr=1e-3, weight_decay=0.01, **options)
        optimizer.step()
        for number, parameter in enumerate(self.parameters):
            state = optimizer.state[parameter]
            names = [name for name, value in state.items() if isinstance(value, Tensor) and value.dim()]
            for name, tensors in zip(names, (self.first, self.second), strict=False):
                if tensors:
                    state[name] = tensors[number]
        step: Step = optimizer.step
        return step

    def move_bytes(self) -> None:
        """Products in place that move as many bytes as the step: half of them are read, and half written.

        Not a copy: the processor would first read the lines that it writes.
        """
        again = self._averages if self.name == "lamb" else [self._gradients[: self._gradients.numel() // 2]]
        for tensor in (self._weights, *self._averages, *again):
            tensor.mul_(1.0)


def evict(buffer: Tensor) -> None:
    """Reads more than the caches hold, on all cores."""
    buffer.sum()


def measure(make_sides: Callable[[], dict[str, Step]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each side in each round, cold and warm."""
    times: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    buffer = torch.ones(CACHES // 4)
    for number in range(rounds):
        if number % PLACED == 0:
            sides: dict[str, Step] = {}  # frees the old memory first
            sides = make_sides()
            for step in sides.values():
                step()  # creates state
        order = list(sides)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name in order if number % 2 else reversed(order):
            evict(buffer)
            for state in times:
                began = time.perf_counter()
                sides[name]()
                times[state].setdefault(name, []).append((time.perf_counter() - began) * 1e3)
    return times


def compare(name: str, elements: int, parts: int, rounds: int, with_deepspeed: bool) -> dict[str, Any]:
    """One cell: median milliseconds of each side, and dsjob's ratio to each other side."""

    def make_sides() -> dict[str, Step]:
        job = Job(name, elements, parts)
        sides: dict[str, Step | None] = {"dsjob": job.step_ours, "memory": job.move_bytes, "torch": job.make_torch()}
        sides["deepspeed"] = job.make_deepspeed() if with_deepspeed else None
        return {side: step for side, step in sides.items() if step is not None}

    cell: dict[str, Any] = {"optimizer": name, "elements": elements, "parameters": parts}
    for state, times in measure(make_sides, rounds).items():
        ratios = {
            side: statistics.median(ours / theirs for ours, theirs in zip(times["dsjob"], found, strict=True))
            for side, found in times.items()
            if side != "dsjob"
        }
        bandwidth = 1 / ratios.pop("memory")
        ms = {side: statistics.median(found) for side, found in times.items()}
        cell[state] = {"ms": ms, "ratio": ratios, "bandwidth": bandwidth}
    return cell


def show(cells: list[dict[str, Any]]) -> str:
    """The cells as a Markdown table."""
    lines = [
        "| optimizer | elements | parameters | caches | dsjob, ms | to torch | to DeepSpeed | of memory's rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for state in ("cold", "warm"):
            found = cell[state]
            ratios = [
                f"{found['ratio'][side]:.2f}" if side in found["ratio"] else "-" for side in ("torch", "deepspeed")
            ]
            lines.append(
                f"| {cell['optimizer']} | {cell['elements']:.0e} | {cell['parameters']} | {state} "
                f"| {found['ms']['dsjob']:.2f} | {ratios[0]} | {ratios[1]} | {found['bandwidth']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    problem = kernels.find_problem()
    if problem:
        parser.exit(1, f"{problem}\n")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cells = [
        compare(name, elements, parts, args.rounds, not args.without_deepspeed)
        for name in args.optimizers
        for elements in args.sizes
        for parts in PARTS
    ]
    print(show(cells))
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "instructions": torch.ops.dsjob.cpu_instruction_set(),
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "cells": cells}, file, indent=2)


if __name__ == "__main__":
    main()
