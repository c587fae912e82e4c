"""Compares `dsjob validate` on a document of 100 keys to a bare Python that imports the same parsers.

    python -m benchmarks.validate [--rounds 15] [--json benchmarks/results/validate.json]

The sides take turns; each run is a new process, and its time includes the start of the interpreter. Times are medians
over the rounds. The ratio is the median over rounds of dsjob's time divided by the bare Python's. Goals: below 0.5 s,
and a ratio below 3.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dsjob.contract import schema as contract

KEYS = 100
BARE = "import jsonschema, yaml"


def make_document() -> dict[str, Any]:
    """A job with 100 keys: arguments of a small model, and the defaults of the largest sections."""
    schema = contract.job_schema()
    document: dict[str, Any] = {
        "model": {"_target_": "my_model.build", "width": 64},
        "data": {"train": {"_target_": "my_data.Lines"}},
        "trainer": {"micro_batch": 4, "max_steps": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
    }
    sections = ("zero_optimization", "fp16", "bf16", "activation_checkpointing", "compile", "launch", "checkpoint")
    for section in sections:
        for key, below in schema["properties"][section]["properties"].items():
            plain = "default" in below and "properties" not in below and "deprecated" not in below
            if plain and below["default"] is not None and count_keys(document) < KEYS - 1:
                document.setdefault(section, {})[key] = below["default"]
    for number in range(KEYS - count_keys(document)):
        document["model"][f"argument_{number}"] = number
    return document


def count_keys(value: Any) -> int:
    """The number of keys, including those of nested objects."""
    return sum(1 + count_keys(item) for item in value.values()) if isinstance(value, dict) else 0


def measure(*command: str) -> float:
    """The seconds of a command from start to end. The command must succeed."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    document = make_document()
    assert count_keys(document) == KEYS
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("JSON", json.dumps(document, indent=2)), ("YAML", to_yaml(document))):
            path = Path(folder) / f"job.{name.lower()}"
            path.write_text(text)
            rounds = [
                (measure(sys.executable, "-c", BARE), measure(sys.executable, "-m", "dsjob", "validate", str(path)))
                for _ in range(args.rounds + 1)
            ][1:]  # the first round pays for caches
            ratios = [ours / bare for bare, ours in rounds]
            cell = {
                "cell": name,
                "bare_s": statistics.median(bare for bare, _ in rounds),
                "dsjob_s": statistics.median(ours for _, ours in rounds),
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
            cells.append(cell)
            print(
                f"{name}, {KEYS} keys   {BARE}: {cell['bare_s']:.3f} s   dsjob validate: {cell['dsjob_s']:.3f} s   "
                f"ratio {cell['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "keys": KEYS, "cells": cells}, file, indent=2)


def to_yaml(document: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False))


if __name__ == "__main__":
    main()
