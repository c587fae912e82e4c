"""benchmarks/gpu.py runs, at tiny sizes on the CPU: ten minutes on a GPU are not to be spent on repairs of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]
# The repository's folder goes last: the folder dsjob there would hide an installed one.
PROGRAM = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('benchmarks.gpu', run_name='__main__')"
SECTIONS = [
    "train",
    "syncs",
    "races",
    "plan",
    "recompute",
    "offload",
    "optimizers",
    "layers",
    "kernels",
    "saves",
    "offload-large",
]


@pytest.mark.slow
def test_every_section_runs(tmp_path: Path) -> None:
    figures = tmp_path / "gpu.json"
    options = ["--smoke", "--sections", *SECTIONS, "--json", str(figures)]
    command = [sys.executable, "-P", "-c", PROGRAM, str(ROOT), *options]
    found = run_program(command, cwd=tmp_path, timeout=500)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    sections = json.loads(figures.read_text())["sections"]
    assert list(sections) == SECTIONS
    assert all(rows and not any("failed" in row for row in rows) for rows in sections.values()), sections
    assert all(row["same"] for row in sections["races"])
    rivals = {"torch's operators", "nn.TransformerEncoderLayer", "transformers' BertLayer"}
    assert all(rivals <= row["ms"].keys() for row in sections["layers"])
