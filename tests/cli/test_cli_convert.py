"""`dsjob convert`: it does what `dsjob.convert` does, and says which flags do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import dsjob as dsjob_command
from jobs import make_job

import dsjob


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_job(tmp_path_factory.mktemp("trained"), trainer={"train_batch": 8, "max_steps": 1})
    done = dsjob_command("cfg.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["bf16", "deepspeed"])
def test_the_command_writes_what_python_writes(folder: Path, tmp_path: Path, form: str) -> None:
    sizes = ["--zero-stage", "1", "--world-size", "2"] if form == "deepspeed" else []
    done = dsjob_command("convert", "--to", form, "run", str(tmp_path / "a"), *sizes, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "load with:" in done.stdout
    if form == "deepspeed":
        dsjob.convert(folder / "run", tmp_path / "b", to="deepspeed", zero_stage=1, world_size=2)
    else:
        dsjob.convert(folder / "run", tmp_path / "b", to="bf16")
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--to", "bf16", "--world-size", "2"], "require --to deepspeed"),
        (["--to", "fp32", "--dtype", "bf16"], "--dtype"),
        (["--to", "fp32", "--merge"], "--merge requires --to hf"),
        (["--to", "deepspeed", "--zero-stage", "2"], "--world-size N"),
        (["--to", "deepspeed", "out", "--zero-stage", "2", "--world-size", "2", "--strip", "a"], "--strip"),
        (["--to", "hf"], "needs a folder"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(folder: Path, flags: list[str], told: str) -> None:
    done = dsjob_command("convert", "run", *flags, cwd=folder)
    assert done.returncode == 2
    assert told in done.stderr
