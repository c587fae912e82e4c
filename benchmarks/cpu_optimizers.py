"""Compares a step of dsjob's CPU kernels to torch's fused optimizers, DeepSpeed's CPU optimizers and memory itself.

    python -m benchmarks.cpu_optimizers [--rounds 15] [--json benchmarks/results/cpu_optimizers.json]

The sides take turns in an order that reverses every round, in one process with all cores. Times are medians over the
rounds; a ratio is the median over rounds of dsjob's time divided by the other's. `memory` is a product in place that
moves as many bytes as the step has to. Its ratio is the fraction of the bandwidth that dsjob reaches, which should be
at least 0.85 where the state exceeds the caches. DeepSpeed's optimizers are compiled when they are first used.
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


def measure(sides: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each side in each round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            began = time.perf_counter()
            sides[name]()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {name: found[2:] for name, found in times.items()}  # the first rounds create state and fill caches


def compare(name: str, elements: int, parts: int, rounds: int, with_deepspeed: bool) -> dict[str, Any]:
    """One cell: median milliseconds of each side, and dsjob's ratio to each other side."""
    sides = {"dsjob": make_ours(name, elements, parts), "memory": make_product(name, elements)}
    others = {"torch": make_torch(name, elements, parts)}
    if with_deepspeed:
        others["deepspeed"] = make_deepspeed(name, elements, parts)
    sides |= {side: step for side, step in others.items() if step is not None}
    times = measure(sides, rounds)
    ratios = {
        side: statistics.median(ours / theirs for ours, theirs in zip(times["dsjob"], found, strict=True))
        for side, found in times.items()
        if side not in ("dsjob", "memory")
    }
    return {
        "optimizer": name,
        "elements": elements,
        "parameters": parts,
        "ms": {side: statistics.median(found) for side, found in times.items()},
        "ratio": ratios,
        "bandwidth": statistics.median(m / o for m, o in zip(times["memory"], times["dsjob"], strict=True)),
    }


def show(cells: list[dict[str, Any]]) -> str:
    """The cells as a Markdown table."""
    lines = [
        "| optimizer | elements | parameters | dsjob, ms | to torch | to DeepSpeed | of memory's rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        ratios = [f"{cell['ratio'][side]:.2f}" if side in cell["ratio"] else "-" for side in ("torch", "deepspeed")]
        lines.append(
            f"| {cell['optimizer']} | {cell['elements']:.0e} | {cell['parameters']} | {cell['ms']['dsjob']:.2f} "
            f"| {ratios[0]} | {ratios[1]} | {cell['bandwidth']:.2f} |"
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
