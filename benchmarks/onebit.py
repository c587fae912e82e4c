"""Compares the compiled packing of signs to the same in PyTorch's operators: alone, and in a mean over two ranks.

    python -m benchmarks.onebit [--rounds 15] [--json benchmarks/results/onebit.json]

`compress` and `expand` run in one process. `mean` is `average_signs` on two ranks, which gloo connects on one machine.
Each process has one thread. The sides take turns in an order that reverses every round. Times are the CPU time of a
process, so that other work on the machine matters less: medians over the rounds. A ratio is the median over rounds of
the compiled op's time divided by that of PyTorch's operators.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from dsjob.ops import onebit
from dsjob.optim.onebit.signs import average_signs, chunk_width

SIZES = (10**6, 10**7)
PARTS = 10  # tensors that the elements are divided into, each with its own scale
RANKS = 2
Side = Callable[[bool], Any]  # called with whether to use the compiled op


def measure(call: Side, rounds: int) -> dict[bool, list[float]]:
    """Milliseconds of both sides in each round."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 2):
        for native in (False, True) if number % 2 else (True, False):
            began = time.process_time()
            call(native)
            times[native].append((time.process_time() - began) * 1e3)
    return {native: found[2:] for native, found in times.items()}  # the first rounds fill caches


def describe(name: str, elements: int, times: dict[bool, list[float]]) -> dict[str, Any]:
    """One cell: median milliseconds of both sides, and their ratio."""
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times[True], times[False], strict=True))
    medians = {"dsjob": statistics.median(times[True]), "torch": statistics.median(times[False])}
    return {"part": name, "elements": elements, "ms": medians, "ratio": ratio}


def compare_parts(elements: int, rounds: int) -> list[dict[str, Any]]:
    """The cells of compressing and expanding."""
    widths = [chunk_width(elements // PARTS, RANKS)] * PARTS
    rows = torch.randn(RANKS, sum(widths))
    alive, scales = torch.rand(rows.shape) < 0.99, torch.rand(RANKS, PARTS)
    packed, _ = onebit.compress(rows, alive, scales, widths)
    sides: dict[str, Side] = {
        "compress": lambda native: onebit.compress(rows, alive, scales, widths, native=native),
        "expand": lambda native: onebit.expand(packed, scales, widths, native=native),
    }
    return [describe(name, elements, measure(side, rounds)) for name, side in sides.items()]


def average_on_rank(rank: int, folder: str, sizes: list[int], rounds: int) -> None:
    """Writes the cells of `mean` to `folder`."""
    torch.set_num_threads(1)
    problem = onebit.find_problem(torch.device("cpu"), build=True)
    assert not problem, problem
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    cells = []
    for elements in sizes:
        width = chunk_width(elements // PARTS, RANKS)
        values = [torch.randn(elements // PARTS) for _ in range(PARTS)]
        live = [torch.ones_like(value, dtype=torch.bool) for value in values]
        workers, servers = ([torch.zeros(*shape) for _ in values] for shape in ((RANKS, width), (width,)))

        def average(native: bool, state: Any = (values, live, workers, servers)) -> None:
            average_signs(*state, native=native)
            dist.barrier()

        cells.append(describe("mean", elements, measure(average, rounds)))
    if rank == 0:
        Path(folder, "cells").write_text(json.dumps(cells), encoding="utf-8")
    dist.destroy_process_group()


def show(cells: list[dict[str, Any]]) -> str:
    """The cells as a Markdown table."""
    lines = ["| part | elements | dsjob, ms | torch, ms | ratio |", "|---|---|---|---|---|"]
    for cell in cells:
        ours, theirs = cell["ms"]["dsjob"], cell["ms"]["torch"]
        lines.append(f"| {cell['part']} | {cell['elements']:.0e} | {ours:.2f} | {theirs:.2f} | {cell['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    problem = onebit.find_problem(torch.device("cpu"), build=True)
    if problem:
        parser.exit(1, f"{problem}\n")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(average_on_rank, (folder, list(args.sizes), args.rounds), RANKS)  # type: ignore[no-untyped-call]
        cells = json.loads(Path(folder, "cells").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    cells += [cell for elements in args.sizes for cell in compare_parts(elements, args.rounds)]
    print(show(cells))
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "instructions": torch.ops.dsjob.onebit_instruction_set(),
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "cells": cells}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
