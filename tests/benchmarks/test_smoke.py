"""Every benchmark runs from a clone, at tiny sizes: whether it still works, not how fast dsjob is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]
TINY = {
    "checkpoint": "--gigabytes 0.001 --ranks 1 --rounds 1 --smoke --folder FOLDER",
    "convert": "--gigabytes 0.01 --repeats 1 --folder FOLDER",
    "cpu_optimizers": "--rounds 1 --sizes 1000 --without-deepspeed",
    "engine": "--sizes tiny --worlds 2 --stages 0 --precisions fp32 --accumulations 1 --against hand --rounds 1",
    "linear_cross_entropy": "--rounds 1 --shapes 8x300x4",
    "loop": "--ranks 2 --rounds 1 --steps 1 --warm-up 1",
    "memory": "--ranks 1 --smoke",
    "nvme": "--rounds 1 --megabytes 2 --folder FOLDER",
    "onebit": "--rounds 1 --sizes 1000",
    "pipeline": "--sizes tiny --micro-batches 2 --rounds 1 --steps 1",
    "programs": "--smoke",
    "quantised": "--megabytes 0.01 --rounds 1",
    "tensor_parallel": "--sizes tiny --rounds 1 --steps 1",
    "text": "--rounds 1 --steps 1 --width 8",
    "transformer_layer": "--rounds 1 --shapes 2x4x8x2",
    "validate": "--rounds 1",
}
# The ranks and interpreters that a benchmark starts are forks, too.
FORKED = """
import functools, os, runpy, signal, subprocess, sys
from programs import Fork
from torch import multiprocessing
multiprocessing.spawn = functools.partial(multiprocessing.start_processes, start_method="fork")

class Forked(Fork):
    def __init__(self, command, env, stdin=None, stdout=None, stderr=None, text=False):
        nothing = os.open(os.devnull, os.O_RDWR)
        given, self.stdin = os.pipe() if stdin == subprocess.PIPE else (nothing, None)
        os.dup2(given, 0)  # the fork's own
        sys.stdin = open(0, closefd=False)
        if self.stdin is not None:
            os.set_inheritable(self.stdin, False)
            self.stdin = os.fdopen(self.stdin, "w")
        super().__init__(command, env, *(nothing if each == subprocess.DEVNULL else each for each in (stdout, stderr)))

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout=60):
        return super().wait(timeout)

def start(command, *others, **options):
    forked = command[:2] == [sys.executable, "-m"] and command[2].startswith("benchmarks.")
    return (Forked if forked else popen)(command, *others, **options)

popen, subprocess.Popen = subprocess.Popen, start
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
FRESH = ("validate",)  # started as from a clone; the others are forks, which has no influence on whether they work
ROWS = {"convert": "results", "memory": "rows"}  # the others: cells


def run(name: str, *arguments: str) -> str:
    module = f"benchmarks.{name}"
    if name in FRESH:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    else:
        done = run_program([sys.executable, "-c", FORKED, module, *arguments], cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_the_benchmark_runs_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    if name in ("checkpoint", "pipeline", "programs"):
        pytest.importorskip("deepspeed", reason="the benchmark compares with DeepSpeed")
    file = tmp_path / "figures.json"
    run(name, *TINY[name].replace("FOLDER", str(tmp_path)).split(), "--json", str(file))
    assert json.loads(file.read_text())[ROWS.get(name, "cells")]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.full
def test_converting_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the benchmark compares with DeepSpeed")
    options = f"--gigabytes --convert 0.1 --rounds 1 --smoke --folder {tmp_path}".split()
    assert "dsjob convert" in run("checkpoint", *options)


def test_deepspeeds_tests_show_a_table_of_no_results(tmp_path: Path) -> None:
    assert run("deepspeed_tests", "--table", "--results", str(tmp_path))


def test_every_benchmark_is_run_here() -> None:
    started = {path for path in (ROOT / "benchmarks").rglob("*.py") if '__name__ == "__main__"' in path.read_text()}
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in started}
    assert names == {*TINY, "library_tests", "deepspeed_tests", "gpu"}  # gpu: test_gpu_smoke.py
