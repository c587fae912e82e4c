"""Configs as people write them, and what `dsjob validate` says of each, word for word.

A config's first line says what it shows; NAME.txt beside it is its expected output, checked by a person before it is
committed. After a change that is meant: DSJOB_WRITE_GOLDEN=1 pytest tests/test_corpus.py, then read `git diff`.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from dsjob.cli import main

FOLDER = Path(__file__).parent / "data" / "configs"
CONFIGS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".yaml"))
RANKS = {  # what the triad of a bare DeepSpeed config is checked for, where not for one rank
    "megatron_pretrain.json": 8,
    "examples_bing_bert.json": 16,
    "examples_onebit_adam.json": 8,
    "triad_effective_zero.json": 8,
}


def validate(name: str) -> str:
    """What the command prints for a config, both streams in their order, and its exit code."""
    printed = io.StringIO()
    ranks = ["--world-size", str(RANKS[name])] if name in RANKS else []
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["validate", name, *ranks])
    return f"{printed.getvalue()}exit {code}\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gets_the_expected_diagnostics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    golden, found = FOLDER / f"{name}.txt", validate(name)
    if os.environ.get("DSJOB_WRITE_GOLDEN"):
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text(encoding="utf-8")


def test_the_corpus_is_complete() -> None:
    """Each config says what it shows, each golden file has its config, and a good part of the configs is right."""
    first_lines = [(FOLDER / name).read_text().split("\n")[0] for name in CONFIGS]
    assert all(line.startswith(("# ", "// ", "/* ")) for line in first_lines)
    assert sorted(path.name for path in FOLDER.glob("*.txt")) == [f"{name}.txt" for name in CONFIGS]
    right = [name for name in CONFIGS if (FOLDER / f"{name}.txt").read_text().endswith("exit 0\n")]
    assert len(CONFIGS) >= 70
    assert len(right) >= 15
