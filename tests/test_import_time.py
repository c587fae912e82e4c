"""Commands that only look at documents start fast, since they never import torch."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_documents import make_job, write_json
from test_layers import MODULES, WITHOUT_TORCH, lives_in

SCRIPT = str(Path(sys.executable).with_name("dsjob"))
SLOW = {"torch", "numpy", "transformers", "sklearn", "pandas"}
NOT_FOR_VALIDATE = {"hydra", "omegaconf", "antlr4", "rich"}
PROBE = """
import json, sys
from dsjob.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    print("PROBE", json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]))
"""
Command = tuple[list[str], int]  # arguments and exit code
LOOKING: list[Command] = [
    (["validate", "job.json"], 0),
    (["validate", "job.yaml"], 0),
    (["validate", "ds.json"], 0),
    (["validate", "bad.json"], 2),
    (["validate", "--help"], 0),
    (["schema", "--help"], 0),
    (["schema", "--view", "recipe", "--format", "text"], 0),
    (["schema", "optimizer.params"], 0),
    (["schema", "trainer", "--format", "json"], 0),
    (["schema", "trainr"], 2),
    (["import", "ds.json"], 0),
    (["import", "--help"], 0),
    (["--help"], 0),
    (["--version"], 0),
]
COMPOSING: list[Command] = [
    (["show", "+recipe=quickstart"], 0),
    (["show", "job.json", "trainer.seed=1", "--format", "json"], 0),
    (["show", "bad.json"], 2),
    (["--cfg", "job", "+recipe=quickstart"], 0),
    (["+recipe=quikstart"], 2),
    (["plan", "--params", "70e9", "--world-size", "64", "zero_optimization.stage=3"], 0),
    (["plan", "job.json", "--params", "7B", "--sweep-stages", "--format", "json"], 0),
    (["+recipe=quickstart", "trainer.mirco_batch=1"], 2),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with documents of each kind."""
    write_json(tmp_path / "job.json", make_job())
    (tmp_path / "job.yaml").write_text(json.dumps(make_job()))
    write_json(tmp_path / "ds.json", {"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    write_json(tmp_path / "bad.json", make_job(trainer={"max_stps": 1}))
    return tmp_path


def list_all_imported(folder: Path, commands: list[list[str]]) -> list[tuple[int, set[str]]]:
    """Runs commands in one new process; the exit code of each, and the packages that it and those before imported."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    return [(code, set(names)) for code, names in found]


def list_imported(folder: Path, *arguments: str) -> tuple[int, set[str]]:
    (found,) = list_all_imported(folder, [list(arguments)])
    return found


def test_looking_at_documents_imports_neither_torch_nor_hydra(folder: Path) -> None:
    found = list_all_imported(folder, [arguments for arguments, _ in LOOKING])
    for (arguments, code), (got, imported) in zip(LOOKING, found, strict=True):
        assert got == code, arguments
        assert imported & (SLOW | NOT_FOR_VALIDATE) == set(), arguments


def test_validating_json_does_without_yaml(folder: Path) -> None:
    assert "yaml" not in list_imported(folder, "validate", "job.json")[1]
    assert "yaml" in list_imported(folder, "validate", "job.yaml")[1]


def test_composing_imports_no_torch(folder: Path) -> None:
    assert "hydra" in list_imported(folder, *COMPOSING[0][0])[1]
    found = list_all_imported(folder, [arguments for arguments, _ in COMPOSING])
    for (arguments, code), (got, imported) in zip(COMPOSING, found, strict=True):
        assert got == code, arguments
        assert imported & SLOW == set(), arguments


def test_the_help_of_plan_imports_neither_torch_nor_yaml(folder: Path) -> None:
    got, imported = list_imported(folder, "plan", "--help")
    assert got == 0
    assert imported & SLOW == set()


def test_the_help_of_convert_imports_no_torch(folder: Path) -> None:
    got, imported = list_imported(folder, "convert", "--help")
    assert got == 0
    assert imported & (SLOW - {"numpy"}) == set()


def test_reading_what_others_saved_imports_no_distributed_checkpoint() -> None:
    """A second, and 100 MB, of a conversion that needs nothing of it."""
    probe = "import sys, dsjob.checkpoint.other.elsewhere; print('torch.distributed.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_rooms_without_torch_import_without_it() -> None:
    below = sorted(f"dsjob.{name}" for name in MODULES if lives_in(name, WITHOUT_TORCH - {"__main__"}))
    probe = f"import importlib, sys\nfor name in {below}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_package_alone_imports_next_to_nothing() -> None:
    probe = "import sys, dsjob; print(sorted(n for n in sys.modules if n.startswith('dsjob') or n == 'torch'))"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "['dsjob']\n"


def test_validate_answers_at_once(folder: Path) -> None:
    """Under half a second on a quiet machine (0.2 s was measured); the bound leaves room for a busy one."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([SCRIPT, "validate", "job.json"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 3, seconds
