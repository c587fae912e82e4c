"""Compares the time of a step in dsjob's engine to other tools, with the same model, batches, optimizer and clipping.

    python -m benchmarks.engine --sizes 10m --worlds 1 2 --stages 0 3 --against hand deepspeed [--json FILE]

hand: the shortest loop around DDP, FSDP2 or the bare module. deepspeed: the installed package, with `engine:
deepspeed`. accelerate, trainer: those of Hugging Face, see engine_sides.py. All sides of a cell run in the same
processes and take turns, in an order that reverses every round. The ratio is the median over rounds of dsjob's time
divided by the other's. Results are merged into the file. Run this on an otherwise idle machine. --processor-time
measures CPU time instead, which other processes disturb less, but which excludes waiting.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
import traceback
from typing import Any

import torch

from benchmarks.engine_sides import SHAPES, SIDES, Cell, Side, use_quiet_libraries
from dsjob.ranks.mesh import World, join_world, leave_world

ROUND_SECONDS = 0.6  # about what a round of one side takes
KEY = ("size", "world", "stage", "precision", "accumulation", "against", "device")


def measure(cell: Cell, world: World, against: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each side that dsjob is compared to, as measured on this rank."""
    sides: dict[str, Side] = {}
    failed: dict[str, str] = {}
    for name in ("dsjob", *against):
        if not SIDES[name].exists(cell, world):
            continue
        try:
            sides[name] = SIDES[name](cell, world)
            sides[name].run(1)
        except Exception as error:
            if name == "dsjob":
                raise
            sides.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if world.data_rank == 0:
                traceback.print_exc()
    steps = choose_steps(sides["dsjob"], world)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            times[name].append(sides[name].run(steps) / steps)
    rows = []
    for name in against:
        place = {"size": cell.size, "world": world.data_size, "stage": cell.stage, "precision": cell.precision}
        place |= {"accumulation": cell.accumulation, "against": name, "device": world.device.type}
        if name in failed:
            rows.append({**place, "failed": failed[name]})
        elif name in sides:
            ours, others = times["dsjob"][1:], times[name][1:]  # the first round warms up
            ratios = [a / b for a, b in zip(ours, others, strict=True)]
            rows.append(
                {
                    **place,
                    "what": sides[name].what,
                    "dsjob_ms": 1000 * statistics.median(ours),
                    "other_ms": 1000 * statistics.median(others),
                    "ratio": statistics.median(ratios),
                    "ratio_range": [min(ratios), max(ratios)],
                    "losses": [sides["dsjob"].last_loss, sides[name].last_loss],
                    "steps": steps,
                    "rounds": rounds,
                }
            )
    for side in sides.values():
        side.close()
    return rows


def choose_steps(side: Side, world: World) -> int:
    """The number of steps in a round; the same on all ranks."""
    steps = torch.tensor(max(1, round(ROUND_SECONDS / side.run(1))), device=world.device)
    if world.data_size > 1:
        torch.distributed.broadcast(steps, src=0)
    return min(int(steps), 50)


def run_rank(rank: int, world_size: int, folder: str, cells: list[Cell], args: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DSJOB_STORE=f"{folder}/store")
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    use_quiet_libraries()
    world = join_world(device="auto")
    world.ensure_group()
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // world_size))
    Side.clock = staticmethod(time.process_time if args.processor_time else time.perf_counter)
    rows: list[dict[str, Any]] = []
    for cell in cells:
        found = measure(cell, world, args.against, args.rounds)
        rows += found
        gc.collect()
        if rank == 0:
            print(*map(describe, found), sep="\n", flush=True)
            with open(f"{folder}/rows.json", "w", encoding="utf-8") as file:
                json.dump(rows, file)
    leave_world()
    os._exit(0)  # other libraries' threads may abort an interpreter that ends


def describe(row: dict[str, Any]) -> str:
    """Formats a row of the table."""
    place = f"{row['size']:>4} {row['world']:>5} {row['stage']:>5} {row['precision']:>9} {row['accumulation']:>5}  "
    if "failed" in row:
        return f"{place}{row['against']:<28} failed: {row['failed'][:90]}"
    low, high = row["ratio_range"]
    return (
        f"{place}{row['what']:<28}{row['dsjob_ms']:>9.1f} {row['other_ms']:>9.1f} "
        f"{row['ratio']:>7.3f}   ({low:.3f} to {high:.3f})"
    )


def merge(path: str, rows: list[dict[str, Any]], keys: tuple[str, ...] = KEY) -> None:
    """Merges rows into the file; replaces rows whose `keys` are equal."""
    before: list[dict[str, Any]] = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before = json.load(file)["cells"]
    by_key = {tuple(row[key] for key in keys): row for row in [*before, *rows]}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"machine": machine, "cells": [by_key[key] for key in sorted(by_key)]}, file, indent=2)
        file.write("\n")


def show(path: str) -> None:
    """Prints the cells of the file as a Markdown table of ratios: dsjob's time divided by the other's."""
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["cells"]
    names = [name for name in SIDES if name != "dsjob"]
    print("| model | ranks | ZeRO | precision | accumulation |", " | ".join(names), "|")
    print("|---" * (5 + len(names)) + "|")
    for place, cells in itertools.groupby(rows, key=lambda row: [row[key] for key in KEY[:5]]):
        ratios = {row["against"]: f"{row['ratio']:.2f}" for row in cells if "ratio" in row}
        print("|", " | ".join([*map(str, place), *(ratios.get(name, "") for name in names)]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["10m", "50m"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    others = [name for name in SIDES if name != "dsjob"]
    parser.add_argument("--against", nargs="+", choices=others, default=others)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=0, help="tokens per sequence")
    parser.add_argument("--threads", type=int, default=0, help="threads per rank; default: cores / ranks")
    parser.add_argument("--processor-time", action="store_true", help="measure CPU time of rank 0, not wall-clock time")
    parser.add_argument("--json", metavar="FILE", help="merge the results into FILE")
    parser.add_argument("--show", metavar="FILE", help="only print FILE as a table")
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    print(
        f"{'size':>4} {'ranks':>5} {'stage':>5} {'precision':>9} {'accum':>5}  {'against':<28}"
        f"{'dsjob ms':>9} {'other ms':>9} {'ratio':>7}"
    )
    started = time.monotonic()
    for size, world_size in itertools.product(args.sizes, args.worlds):
        cells = [
            Cell(size, stage, precision, accumulation, args.micro_batch, args.sequence)
            for stage, precision, accumulation in itertools.product(args.stages, args.precisions, args.accumulations)
        ]
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, folder, cells, args)
            torch.multiprocessing.spawn(run_rank, arguments, nprocs=world_size)  # type: ignore[no-untyped-call]
            with open(f"{folder}/rows.json", encoding="utf-8") as file:
                rows = json.load(file)
        if args.json:
            merge(args.json, rows)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
