"""Compares the rate of `ops.disk` to that of fio, or of dd where fio is not installed, in the same folder.

    python -m benchmarks.nvme [--folder .] [--megabytes 1024] [--rounds 9] [--json benchmarks/results/nvme.json]

The sides take turns. Each moves the same bytes past the page cache, in blocks of the same size: fio with libaio and the
same number of requests in flight, dd with one. Rates are medians over the rounds; a ratio is the median over rounds of
dsjob's rate divided by the other's. It should be at least 0.8.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import Any

from dsjob.ops.disk import Buffer, Piece, ScratchFile, Transfer

PART = 64 << 20  # bytes of a transfer


def measure_ours(file: ScratchFile, total: int, buffers: list[Buffer], kind: str) -> float:
    """Seconds to move `total` bytes, with two transfers under way at a time."""
    running: list[Transfer] = []
    began = time.perf_counter()
    for number, offset in enumerate(range(0, total, PART)):
        if len(running) == len(buffers):
            running.pop(0).wait()
        piece = Piece(offset, 0, min(PART, total - offset))
        move = file.read if kind == "read" else file.write
        running.append(move([piece], buffers[number % len(buffers)]))
    for transfer in running:
        transfer.wait()
    return time.perf_counter() - began


def measure_other(path: str, total: int, block: int, depth: int, kind: str) -> float:
    """Seconds that fio, or dd, takes to move `total` bytes of the file `path`."""
    if shutil.which("fio"):
        command = ["fio", "--name=x", f"--filename={path}", f"--rw={kind}", f"--size={total}", f"--bs={block}"]
        command += ["--direct=1", "--ioengine=libaio", f"--iodepth={depth}", "--output-format=json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return float(found["jobs"][0][kind]["runtime"]) / 1000
    ends = [f"if={path}", "of=/dev/null", "iflag=direct"]
    if kind == "write":
        ends = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
    began = time.perf_counter()
    subprocess.run(["dd", *ends, f"bs={block}", f"count={total // block}"], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes per request")
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--json", help="file for the result")
    args = parser.parse_args()
    total = args.megabytes << 20
    file = ScratchFile(args.folder, block_size=args.block, requests=args.depth)
    file.allocate(total)
    buffers = [Buffer(), Buffer()]
    for buffer in buffers:
        buffer.reserve(PART)
        buffer.bytes.fill_(1)
    seconds: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
    with tempfile.NamedTemporaryFile(dir=args.folder) as other:
        for number in range(args.rounds + 1):  # the first round fills both files, and does not count
            for kind, found in seconds.items():
                pair = (
                    measure_ours(file, total, buffers, kind),
                    measure_other(other.name, total, args.block, args.depth, kind),
                )
                if number:
                    found.append(pair)
    result: dict[str, Any] = {
        "against": "fio" if shutil.which("fio") else "dd",
        "direct": file.direct,
        "bytes": total,
        "block": args.block,
        "depth": args.depth,
        "cores": os.cpu_count(),
        "cells": [],
    }
    for kind, pairs in seconds.items():
        ours, theirs = (total / 1e6 / statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(other / own for own, other in pairs)
        cell = {"kind": kind, "ours_mb_s": round(ours), "other_mb_s": round(theirs), "ratio": round(ratio, 2)}
        result["cells"].append(cell)
        print(f"{kind:5}: {ours:8,.0f} MB/s, {result['against']} {theirs:8,.0f} MB/s, ratio {ratio:.2f}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump(result, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
