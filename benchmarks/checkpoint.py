"""The cost of checkpoints: saving and loading compared to torch's DCP and DeepSpeed, converting to DeepSpeed's script.

    python -m benchmarks.checkpoint --gigabytes 1 4 --convert 335 [--json benchmarks/results/checkpoint.json]

All sides have the same state: fp32 weights and AdamW's moments of a transformer, at stage 0 on one rank and at stage 3
on several. dsjob and DCP save the same tensors in the same processes, in turns, both with fsync. DeepSpeed runs in its
own processes. It never syncs, so the benchmark fsyncs its files afterwards. The disk is idle when a save begins, and
everything that is loaded or converted is in the page cache. dsjob also hashes what it saves and verifies what it loads.
Times are medians over rounds, of the slowest rank. `MB`: the peak memory of a rank minus its memory before.

Converting measures commands from start to end, on a ZeRO-2 checkpoint in bf16 of two ranks. DeepSpeed's script does not
fsync its output. `MB` excludes an interpreter with the same imports. Results are merged into the file. Run this on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.checkpoint_sides import STATE, Ours, Row, Theirs, run_maker, run_sides, sync, warm

# A command in its own process, which reports its peak memory: rusage of a child would include its parent's memory.
RUN = """
import os, runpy, sys
try:
    if len(sys.argv) > 2:
        sys.argv = sys.argv[2:]
        run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
        run(sys.argv[0], run_name="__main__")
    else:
        exec(sys.argv[1])
finally:
    sys.stdout.flush()
    print("peak", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), flush=True)
"""
IMPORTS = {
    "dsjob convert": "import dsjob.cli.convert, dsjob.checkpoint.offline.convert, dsjob.checkpoint.other.elsewhere",
    "zero_to_fp32.py": "import argparse, concurrent.futures, hashlib, json, zipfile",
    "DeepSpeed": "import torch, numpy, deepspeed.utils, deepspeed.checkpoint.constants",
}
KEY = ("part", "gigabytes", "ranks", "against")


def spawn(function: Any, world_size: int, *arguments: Any) -> None:
    torch.multiprocessing.spawn(function, (world_size, *arguments), nprocs=world_size)  # type: ignore[no-untyped-call]


def measure_state(folder: Path, gigabytes: float, world_size: int, rounds: int) -> list[Row]:
    """The rows of the table for one size and number of ranks."""
    found: dict[str, list[Row]] = {}
    for kind in (Ours, Theirs):
        spawn(run_sides, world_size, str(folder), kind, gigabytes * 1e9 / STATE, rounds)
        found |= torch.load(folder / "rows")
        if kind is Ours:
            size = sum(path.stat().st_size for path in folder.glob("dsjob/save*/*.safetensors"))
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    place = {"gigabytes": gigabytes, "ranks": world_size, "bytes": size}
    ours, stalls = found["save dsjob"], found["save async"]
    save = compare("save", "DCP", ours, found["save dcp"], "s", 1.2, 100)
    theirs = compare("save", "DeepSpeed", ours, found["save deepspeed"], "synced_s", 1.0)
    bare = {"other_unsynced_s": statistics.median(row["s"] for row in found["save deepspeed"][1:])}
    async_ = compare("stall", "its own sync save", stalls, ours, "s", 0.1)
    more = {"first_s": stalls[0]["s"], "total_s": statistics.median(row["total_s"] for row in stalls[1:])}
    load = compare("load", "DCP", found["load dsjob"], found["load dcp"], "s", 1.3)
    return [{**row, **place} for row in (save, {**theirs, **bare}, {**async_, **more}, load)]


def compare(
    part: str, against: str, ours: list[Row], others: list[Row], key: str, goal: float, goal_mb: float = 0
) -> Row:
    """One row. The first round of each side is a warm-up, and only counts for the memory. `goal_mb`: 0 for no goal."""
    ratios = [a["s"] / b[key] for a, b in zip(ours[1:], others[1:], strict=True)]
    return {
        "part": part,
        "against": against,
        "dsjob_s": statistics.median(row["s"] for row in ours[1:]),
        "other_s": statistics.median(row[key] for row in others[1:]),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "goal": goal,
        "goal_mb": goal_mb,
        "dsjob_mb": max(row["mb"] for row in ours),
        "other_mb": max(row["mb"] for row in others),
    }


def measure_conversion(folder: Path, parameters: float, rounds: int) -> list[Row]:
    """Compares `dsjob convert` on DeepSpeed's folder, and dsjob's script on dsjob's, to DeepSpeed's script."""
    for program in ("DeepSpeed", "dsjob"):
        spawn(run_maker, 2, str(folder), program, parameters)
        (folder / "store").unlink(missing_ok=True)
    commands = {
        "DeepSpeed": [f"{folder}/DeepSpeed/zero_to_fp32.py", f"{folder}/DeepSpeed", "OUT", "--safe_serialization"],
        "dsjob convert": ["dsjob", "convert", "--to", "fp32", f"{folder}/DeepSpeed", "OUT"],
        "zero_to_fp32.py": [f"{folder}/dsjob/zero_to_fp32.py", f"{folder}/dsjob", "OUT"],
    }
    starts = {side: run_command([sys.executable, "-c", RUN, text])["mb"] for side, text in IMPORTS.items()}
    found: dict[str, list[Row]] = {side: [] for side in commands}
    for number in range(rounds + 1):
        for side in commands if number % 2 else reversed(commands):
            out = folder / f"out-{side.split()[0]}"
            shutil.rmtree(out, ignore_errors=True)
            warm(folder / ("dsjob" if side == "zero_to_fp32.py" else "DeepSpeed"))
            command = [sys.executable, "-c", RUN, "", *commands[side]]
            row = run_command([str(out) if word == "OUT" else word for word in command])
            for path in out.iterdir():
                sync(path)  # so that nothing waits for the disk when the next one begins
            found[side].append({**row, "mb": row["mb"] - starts[side], "peak_mb": row["mb"]})
    size = require_same(*(folder / f"out-{side.split()[0]}" for side in ("DeepSpeed", "dsjob convert")))
    rows = []
    for side in ("dsjob convert", "zero_to_fp32.py"):
        row = {**compare(side, "DeepSpeed", found[side], found["DeepSpeed"], "s", 1 / 3, 150)}
        peaks = {name: max(r["peak_mb"] for r in found[name]) for name in (side, "DeepSpeed")}
        row |= {"dsjob_peak_mb": peaks[side], "other_peak_mb": peaks["DeepSpeed"]}
        rows.append({**row, "gigabytes": size / 1e9, "ranks": 2, "bytes": size})
    return rows


def run_command(command: list[str]) -> Row:
    """The seconds that a command takes, and its peak memory."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command[3:])}: {done.stderr[-2000:]}")
    return {"s": seconds, "mb": int(done.stdout.rsplit("peak ", 1)[1]) * 1024 / 1e6}


def require_same(theirs: Path, ours: Path) -> int:
    """Bytes of the tensors, if both folders contain bitwise equal ones. Tied weights count once."""
    sides = [
        {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
        for folder in (theirs, ours)
    ]
    for name, tensor in sides[0].items():
        assert torch.equal(tensor, sides[1][name]), name
    return sum(tensor.nbytes for tensor in sides[0].values())


def describe_machine(folder: Path, smoke: bool) -> Row:
    """Describes the machine. `disk`: MB/s of writing and syncing a file of 1 GB (8 MB in a smoke run)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    block, target, count = bytes(8 << 20), folder / "disk", 1 if smoke else 120
    started = time.monotonic()
    with target.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
    sync(target)
    speed = count * len(block) / 1e6 / (time.monotonic() - started)
    target.unlink()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {name: version(name) for name in ("torch", "deepspeed")}
    found = {"cpu": next(names, platform.machine()), "cores": os.cpu_count(), "memory_gb": round(memory / 1e9, 1)}
    found |= {"disk_mb_s": round(speed), "python": platform.python_version(), "kernel": platform.release()}
    return {**found, **versions}


def describe(row: Row) -> str:
    """Formats a row of the table."""
    low, high = row["ratio_range"]
    names = f"{row['part']:<16}{row['gigabytes']:>5.2f} {row['ranks']:>5}  {row['against']:<18}"
    times = f"{row['dsjob_s']:>8.3f} {row['other_s']:>8.3f} {row['ratio']:>6.2f}  ({low:.2f} to {high:.2f})"
    met = row["ratio"] <= row["goal"] and (not row["goal_mb"] or row["dsjob_mb"] <= row["goal_mb"])
    goals = f"{row['goal']:.2f}" + (f", {row['goal_mb']} MB" if row["goal_mb"] else "")
    memory = f"{row['dsjob_mb']:>7.0f} {row['other_mb']:>7.0f}"
    return f"{names}{times:<43}{memory}   {'met' if met else 'missed'} {goals}"


def merge(path: str, machine: Row, rows: list[Row]) -> None:
    """Merges rows into the file; replaces rows of the same cells."""
    before = json.loads(Path(path).read_text())["cells"] if os.path.exists(path) else []
    by_key = {tuple(row[key] for key in KEY): row for row in [*before, *rows]}
    cells = [by_key[key] for key in sorted(by_key)]
    Path(path).write_text(json.dumps({"machine": machine, "cells": cells}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gigabytes", type=float, nargs="*", default=[0.25], help="size of the state; none: only converting"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--convert", type=float, metavar="M", help="also convert M million parameters")
    parser.add_argument("--folder", default=".", help="folder to write to, on the disk to measure")
    parser.add_argument("--smoke", action="store_true", help="check only that it runs; barely measures the disk")
    parser.add_argument("--json", metavar="FILE", help="merge the results into FILE")
    args = parser.parse_args()
    started, rows = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        machine = describe_machine(folder, args.smoke)
        print(", ".join(f"{key} {value}" for key, value in machine.items()))
        print(f"{'':<16}{'GB':>5} {'ranks':>5}  {'against':<18}{'dsjob s':>8} {'other s':>8} {'ratio':>6}", end="")
        print(f"{'MB':>26}{'MB':>8}   goal")
        for gigabytes in args.gigabytes:
            for world_size in args.ranks:
                rows += measure_state(folder, gigabytes, world_size, args.rounds)
                print(*map(describe, rows[-4:]), sep="\n", flush=True)
        if args.convert:
            rows += measure_conversion(folder, args.convert * 1e6, args.rounds)
            print(*map(describe, rows[-2:]), sep="\n", flush=True)
    finally:
        shutil.rmtree(folder)
    if args.json:
        merge(args.json, machine, rows)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
