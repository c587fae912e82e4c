"""Runs accelerate's own DeepSpeed tests on dsjob's engine, or with `--engine deepspeed` on the installed DeepSpeed.

    python -m benchmarks.accelerate_tests CHECKOUT [--engine deepspeed] [--results FILE]

CHECKOUT is a clone of accelerate. The tests run unchanged, on the CPU. They need `parameterized` installed.
Prints the number of tests by file and outcome, and the error of each that fails; `--results` also writes them as lines
of JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dsjob.programs.alias import stand_in

# It downloads a model and a data set, and checks the accuracy after training.
NEEDS_THE_HUB = "test_basic_run"


def run_tests(checkout: Path, engine: str, results: Path) -> list[dict[str, Any]]:
    """Runs the tests; each result has `test`, `outcome` and `error`."""
    environment = {
        **os.environ,
        "ACCELERATE_OUT": str(results.absolute()),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    if engine == "dsjob":
        stand_in(environment)
    results.unlink(missing_ok=True)
    plugin = ["-p", "benchmarks.accelerate_tests.plugin", "-p", "no:cacheprovider", "-o", "addopts="]
    tests = sorted(str(file.absolute()) for file in (checkout / "tests" / "deepspeed").glob("test_deepspeed*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugin, *tests, "-k", f"not {NEEDS_THE_HUB}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not results.exists():
        sys.exit(f"pytest ended with {done.returncode}, without a result:\n{done.stdout[-4000:]}")
    return [json.loads(line) for line in results.read_text().splitlines()]


def print_table(entries: list[dict[str, Any]]) -> None:
    """Prints a Markdown table of counts by file, then the failures."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for entry in entries:
        counts[entry["test"].partition("::")[0]][entry["outcome"]] += 1
    print("| file | tests | passed | failed | skipped |\n|---|---|---|---|---|")
    for file, count in sorted(counts.items()):
        print(f"| {file} | {count.total()} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    for entry in entries:
        if entry["outcome"] == "failed":
            print(f"{entry['test']}: {(entry['error'].splitlines() or [''])[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerate_tests")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--engine", choices=["dsjob", "deepspeed"], default="dsjob")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print_table(run_tests(args.checkout, args.engine, args.results or Path(folder, "results.jsonl")))


if __name__ == "__main__":
    main()
