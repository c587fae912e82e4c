"""Compares converting a checkpoint to copying its bytes on the same disk: seconds (medians) and peak memory.

    python -m benchmarks.convert [--gigabytes 1] [--repeats 5] [--folder .] [--json benchmarks/results/convert.json]

The copy reads as many bytes as the output has from the same shard (in the page cache), writes them, and fsyncs. For
bf16 and fp16, that is half of what converting must read. `memory`: the peak resident memory of the converting process,
minus that of an interpreter with the same imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import dsjob

WAYS = {
    "fp32": ["--to", "fp32"],
    "bf16": ["--to", "bf16"],
    "fp16": ["--to", "fp16"],
    "fp32, torch": ["--to", "fp32", "--format", "torch"],
}
RUN = """
import sys
from dsjob.cli import main
import dsjob.cli.convert, numpy
code = main(sys.argv[1:]) if sys.argv[1:] else 0
print("peak", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
raise SystemExit(code)
"""


def save(folder: Path, gigabytes: float) -> Path:
    """Saves a checkpoint of fp32 weights in tensors of 64 MiB. Returns the path of its shard."""
    count = max(1, round(gigabytes * 1e9 / (64 << 20)))
    model = nn.ParameterDict({f"w{i}": torch.randn(4096, 4096) for i in range(count)})
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    dsjob.initialize(model=model, config=config)[0].save_checkpoint(folder)
    return next(folder.glob("*/r0*.safetensors"))


def find_peak(*arguments: str) -> int:
    """The peak resident memory of a process that runs the command, in KiB; without arguments, one that only starts."""
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.rsplit("peak ", 1)[1])


def measure(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall-clock time, and of processor time."""
    started, used = time.monotonic(), time.process_time()
    action()
    return time.monotonic() - started, time.process_time() - used


def copy(shard: Path, target: Path, size: int) -> None:
    """Copies `size` bytes in blocks, with fsync."""
    with open(shard, "rb", buffering=0) as source, open(target, "wb", buffering=0) as out:
        while size > 0 and (block := source.read(min(8 << 20, size))):
            size -= out.write(block)
        os.fsync(out.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description="Converting a checkpoint against copying its bytes.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=".", help="folder to write to, on the disk to measure")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    from dsjob.checkpoint.offline.convert import convert

    results = {}
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        shard = save(folder / "checkpoints", args.gigabytes)
        start = find_peak()
        for name, given in WAYS.items():
            to, form = given[1], "torch" if "torch" in given else "safetensors"
            out = folder / "out"
            times: dict[str, list[tuple[float, float]]] = {"convert": [], "copy": []}
            for _ in range(args.repeats):
                for path in (out, folder / "copy"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                source, target = str(folder / "checkpoints"), str(out)
                times["convert"].append(measure(lambda: convert(source, target, to=to, form=form)))  # type: ignore[arg-type] # noqa: B023
                size = next(path.stat().st_size for path in out.iterdir())
                times["copy"].append(measure(lambda: copy(shard, folder / "copy", size)))  # noqa: B023
            shutil.rmtree(out)
            peak = find_peak("convert", source, target, *given)
            medians = {side: statistics.median(wall for wall, _ in pairs) for side, pairs in times.items()}
            cpu = {f"{side}_cpu": statistics.median(used for _, used in pairs) for side, pairs in times.items()}
            speed = medians["copy"] / medians["convert"]
            results[name] = {**medians, **cpu, "speed": speed, "memory": (peak - start) / 1024}
            sides = (f"{side} {medians[side]:.2f} s ({cpu[f'{side}_cpu']:.2f} s of a core)" for side in medians)
            row = f"{name:12}  {'  '.join(sides)}  {100 * speed:.0f}% of its speed"
            print(f"{row}  {results[name]['memory']:.0f} MiB")
    finally:
        shutil.rmtree(folder)
    if args.json:
        found = {"gigabytes": args.gigabytes, "repeats": args.repeats, "cores": os.cpu_count(), "results": results}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
