"""Compares dsjob.linear_cross_entropy to torch's linear layer and cross entropy, forward and backward, on the CPU.

    python -m benchmarks.linear_cross_entropy [--rounds 3] [--json benchmarks/results/linear_cross_entropy.json]

Each side runs in a process of its own, which starts as a fork. Times are medians over the rounds, after one round to
warm up. Memory is the growth of the process's peak over inputs and outputs that exist before the first round.
`torch chunks` is torch.nn.functional.linear_cross_entropy with its default chunks, where torch has it. Liger is not a
side: its kernels are Triton's, which need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch.nn import functional as F

from dsjob.ops.linear_cross_entropy import linear_cross_entropy

SHAPES = ("1024x128256x512",)  # tokens, classes, features
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def _in_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    loss: Tensor = F.linear_cross_entropy(hidden, weight, target, options=options)  # type: ignore[attr-defined, unused-ignore]
    return loss


SIDES: dict[str, Loss] = {"dsjob": linear_cross_entropy, "torch": _plain}
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    SIDES["torch chunks"] = _in_chunks


def _measure(side: str, shape: str, dtype: str, rounds: int, results: Any) -> None:
    """Puts the median milliseconds and the growth of the peak in MiB into `results`."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokens, classes, features = map(int, shape.split("x"))
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, features, dtype=kind).requires_grad_()
    weight = (torch.randn(classes, features, dtype=kind) * features**-0.5).requires_grad_()
    target = torch.randint(classes, (tokens,))
    tiny = torch.ones(2, 2, dtype=kind, requires_grad=True)
    SIDES[side](tiny, tiny, torch.zeros(2, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]  # imports
    spare = [torch.ones_like(hidden), torch.ones_like(weight)]  # the size of the gradients, which each side has to hold
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    del spare
    for _ in range(rounds + 1):
        hidden.grad = weight.grad = None
        began = time.perf_counter()
        SIDES[side](hidden, weight, target).backward()  # type: ignore[no-untyped-call]
        times.append((time.perf_counter() - began) * 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.put((statistics.median(times[1:]), (peak - before) / 1024))


def compare(shape: str, dtype: str, rounds: int, sides: Sequence[str]) -> dict[str, Any]:
    """One cell: each side's median milliseconds and memory."""
    cell: dict[str, Any] = {"shape": shape, "dtype": dtype, "ms": {}, "mib": {}}
    context = multiprocessing.get_context("fork")
    for side in sides:
        results = context.SimpleQueue()
        process = context.Process(target=_measure, args=(side, shape, dtype, rounds, results))
        process.start()
        cell["ms"][side], cell["mib"][side] = results.get()
        process.join()
    return cell


def show(cell: dict[str, Any]) -> str:
    """A cell as lines of a Markdown table."""
    return "\n".join(
        f"| {cell['shape']} | {cell['dtype']} | {side} | {cell['ms'][side]:.0f} | {cell['mib'][side]:.0f} |"
        for side in cell["ms"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=("float32",))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    print("| tokens x classes x features | dtype | side | time, ms | memory, MiB |\n|---|---|---|---|---|")
    cells = []
    for shape in args.shapes:
        for dtype in args.dtypes:
            cells.append(compare(shape, dtype, args.rounds, args.sides))
            print(show(cells[-1]), flush=True)
    if args.json:
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "cells": cells}, file, indent=2)


if __name__ == "__main__":
    main()
