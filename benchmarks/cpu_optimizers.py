"""Compares a step of dsjob's CPU kernels to torch's fused optimizers, DeepSpeed's CPU optimizers and memory itself.

    python -m benchmarks.cpu_optimizers [--rounds 15] [--json benchmarks/results/cpu_optimizers.json]

The sides take turns in one process with all cores. Before its turn, a side's state is evicted from the caches, as the
passes of a training step do: otherwise a side that follows itself would find its state there, and its rivals would not.
It then steps twice: `cold`, and `warm`, which matters for what fits into the caches. Times are medians over the rounds;
a ratio is the median over rounds of dsjob's time divided by the other's. Every few rounds, all state moves to new
memory, since a step's speed depends on where its pages are. `memory` is a product in place that moves as many bytes as
the step has to. Its ratio is the fraction of the bandwidth that dsjob reaches, which should be at least 0.85 where the
state exceeds the caches. DeepSpeed's optimizers are compiled when they are first used.
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
# Bytes per element that a step reads and writes: fp32 weights, gradients and state.
BYTES = {"adamw": 28, "lion": 20, "adagrad": 20}
Step = Callable[[], Any]


def make(elements: int, parts: int) -> list[nn.Parameter]:
    """Parameters with gradients."""
    parameters = [nn.Parameter(torch.randn(elements // parts)) for _ in range(parts)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def make_ours(name: str, elements: int, parts: int) -> Step:
    parameters = make(elements, parts)
    weights, gradients = [p.data for p in parameters], [p.grad for p in parameters if p.grad is not None]
    averages, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    if name == "adamw":
        options: dict[str, Any] = {"rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.01}
        return lambda: kernels.adam_(weights, gradients, averages, squares, [1.0] * parts, **options)
    if name == "lion":
        return lambda: kernels.lion_(weights, gradients, averages, rate=1e-3, betas=(0.9, 0.99), decay=0.01)
    return lambda: kernels.adagrad_(weights, gradients, squares, [1e-3] * parts, eps=1e-10, decay=0.01)


def make_torch(name: str, elements: int, parts: int) -> Step | None:
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
    if name not in kinds:
        return None
    step: Step = kinds[name](make(elements, parts), lr=1e-3, weight_decay=0.01, fused=True).step
    return step


def make_deepspeed(name: str, elements: int, parts: int) -> Step | None:
    try:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion
    except ImportError:
        return None
    kinds: dict[str, Any] = {"adamw": DeepSpeedCPUAdam, "lion": DeepSpeedCPULion, "adagrad": DeepSpeedCPUAdagrad}
    step: Step = kinds[name](make(elements, parts), lr=1e-3, weight_decay=0.01).step
    return step


def make_product(name: str, elements: int) -> Step:
    """A product in place that moves as many bytes as the step: half of them are read, and half written.

    Not a copy: the processor would first read the lines that it writes.
    """
    values = torch.ones(elements * BYTES[name] // 8)
    multiply: Callable[[float], Tensor] = values.mul_
    return lambda: multiply(1.0)


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
        sides: dict[str, Step | None] = {
            "dsjob": make_ours(name, elements, parts),
            "memory": make_product(name, elements),
            "torch": make_torch(name, elements, parts),
            "deepspeed": make_deepspeed(name, elements, parts) if with_deepspeed else None,
        }
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
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    problem = kernels.find_problem()
    if problem:
        parser.exit(1, f"{problem}\n")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cells = [
        compare(name, elements, parts, args.rounds, not args.without_deepspeed)
        for name in BYTES
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
