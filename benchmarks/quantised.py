"""Measures whether block-quantised communication (ZeRO++) would pay: a gather of weights in 8 bits against one in bf16.

    python -m benchmarks.quantised [--megabytes 64] [--rounds 9] [--json benchmarks/results/quantised.json]

Two gloo ranks gather shards of bf16 weights, as stage 3 does. One side sends bf16. The other computes a scale for each
block of 256 values, rounds them to 8 bits, sends these and the scales, and multiplies. The sides take turns. A ratio is
the median over rounds of the quantised side's time divided by the other's. From the times of both parts follows the
rate of a network at which the sides are equally fast: quantising pays only on a slower one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.ranks.mesh import join_world, leave_world

RANKS, BLOCK = 2, 256


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit values and the fp32 scale of each block of `x`, whose size is a multiple of BLOCK."""
    blocks = x.view(-1, BLOCK).float()
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scales.clamp_min(1e-30)).round().to(torch.int8), scales


def restore(values: Tensor, scales: Tensor) -> Tensor:
    return (values * scales).to(torch.bfloat16).view(-1)


def gather(part: Tensor) -> Tensor:
    whole = part.new_empty(RANKS * part.shape[0], *part.shape[1:])
    dist.all_gather(list(whole.chunk(RANKS)), part)
    return whole


def gather_quantised(part: Tensor) -> Tensor:
    values, scales = quantise(part)
    return restore(gather(values), gather(scales))


def clock(action: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def run_rank(rank: int, folder: str, megabytes: float, rounds: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), DSJOB_STORE=f"{folder}/store")
    join_world(device="cpu")
    torch.set_num_threads(1)
    part = torch.randn(int(megabytes * 1e6 / 2 / RANKS) // BLOCK * BLOCK, dtype=torch.bfloat16)
    values, scales = quantise(part)
    whole = gather(values), gather(scales)
    sides = {
        "bf16": lambda: gather(part),
        "int8": lambda: gather_quantised(part),
        "computing": lambda: (quantise(part), restore(*whole)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sides if number % 2 else reversed(sides):
            spent = clock(sides[name])
            if number:
                seconds[name].append(spent)
    if rank == 0:
        error = (restore(values, scales).float() - part.float()).norm() / part.float().norm()
        received = part.numel() * part.element_size() * (RANKS - 1)
        median = {name: statistics.median(found) for name, found in seconds.items()}
        # Quantising saves half of the bytes, but for the scales, and adds the time of computing.
        saved = received * (0.5 - 2 / BLOCK)
        cell = {
            "cell": f"{megabytes:g} MB",
            "ms": {name: found * 1e3 for name, found in median.items()},
            "ratio": statistics.median(a / b for a, b in zip(seconds["int8"], seconds["bf16"], strict=True)),
            "pays_below_gbit_s": saved / median["computing"] * 8e-9,
            "relative_error": float(error),
        }
        with open(f"{folder}/cell.json", "w", encoding="utf-8") as file:
            json.dump(cell, file)
    leave_world()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[16, 64, 256], help="of bf16 weights")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    cells = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (folder, megabytes, args.rounds), nprocs=RANKS)  # type: ignore[no-untyped-call]
            with open(f"{folder}/cell.json", encoding="utf-8") as file:
                cell = json.load(file)
        cells.append(cell)
        ms = cell["ms"]
        print(
            f"{cell['cell']:>8}  bf16 {ms['bf16']:7.1f} ms   int8 {ms['int8']:7.1f} ms, {ms['computing']:.1f} of them"
            f" computing   ratio {cell['ratio']:.2f}   pays below {cell['pays_below_gbit_s']:.1f} Gbit/s   "
            f"weights differ by {cell['relative_error']:.2%}"
        )
    if args.json:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "cells": cells}, file, indent=2)


if __name__ == "__main__":
    main()
