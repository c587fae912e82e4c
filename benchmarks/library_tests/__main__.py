"""Runs a library's own DeepSpeed tests on dsjob's engine, or with `--engine deepspeed` on the installed DeepSpeed.

    python -m benchmarks.library_tests accelerate CHECKOUT [--engine deepspeed] [--results FILE]
    python -m benchmarks.library_tests transformers CHECKOUT [--warmup 1] [--engine deepspeed] [--results FILE]

CHECKOUT is a clone of the library, at the installed version. The tests run unchanged, on the CPU. They need
`parameterized` installed. Prints the number of tests by file and outcome, and the error of each that fails; `--results`
also writes them as lines of JSON. `--warmup N`: `TrainingArguments` give schedules at least N warm-up steps.
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

LIBRARIES = ("accelerate", "transformers")

# What downloads data and metrics: accelerate's test of accuracy, and most of transformers' tests of its examples.
NEEDS_THE_HUB = {
    "accelerate": "test_basic_run",
    "transformers": "(TestDeepSpeedWithLauncher and not test_clm_from_config)",
}

# Ranks that a test starts import this first.
IN_RANKS = """
import os
if "RANK" in os.environ:
    import benchmarks.library_tests.conditions as conditions
    conditions.lift()
"""


def run_tests(library: str, checkout: Path, engine: str, results: Path, warmup: int = 0) -> list[dict[str, Any]]:
    """Runs the tests; each result has `test`, `outcome` and `error`."""
    results.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = _make_environment(Path(folder), engine)
        environment.update(
            LIBRARY_TESTS=library, LIBRARY_TESTS_OUT=str(results.absolute()), LIBRARY_TESTS_WARMUP=str(warmup)
        )
        environment["PYTHONPATH"] += f"{os.pathsep}{checkout.absolute()}"  # tests import each other
        plugin = ["-p", "benchmarks.library_tests.plugin", "-p", "no:cacheprovider", "-o", "addopts="]
        tests = sorted(str(file.absolute()) for file in (checkout / "tests" / "deepspeed").glob("test_deepspeed*.py"))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugin, *tests]
        command += ["-k", f"not {NEEDS_THE_HUB[library]}"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not results.exists():
        sys.exit(f"pytest ended with {done.returncode}, without a result:\n{done.stdout[-4000:]}")
    return [json.loads(line) for line in results.read_text().splitlines()]


def _make_environment(folder: Path, engine: str) -> dict[str, str]:
    """The environment of the tests. `folder` gets the command `deepspeed`, which the tests start, and IN_RANKS."""
    (folder / "sitecustomize.py").write_text(IN_RANKS)
    launcher = folder / "deepspeed"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsjob exec --engine {engine} "$@"\n')
    launcher.chmod(0o755)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(folder), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    if engine == "dsjob":
        stand_in(environment)
    return environment


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library_tests")
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--engine", choices=["dsjob", "deepspeed"], default="dsjob")
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or Path(folder, "results.jsonl")
        print_table(run_tests(args.library, args.checkout, args.engine, results, args.warmup))


if __name__ == "__main__":
    main()
