"""`dsjob import` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsjob.cli import main
from dsjob.document import parse

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "overlap_com": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a DeepSpeed config, which is the current one."""
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED, indent=1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_yaml_with_its_notes_at_the_top(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "ds.json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert '#   ds.json:5:3: zero_optimization.overlap_com=true: did you mean "overlap_comm"?' in shown.out
    assert "_target_: my_module.build_model  # placeholder" in shown.out
    assert parse(shown.out, "job.yaml").value["optimizer"] == DEEPSPEED["optimizer"]


def test_json_with_its_notes_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "ds.json", "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["zero_optimization"] == {"stage": 2}
    assert "did you mean" in shown.err


def test_a_job_that_was_filled_in_validates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--", "deepspeed", "--num_gpus", "2", "train.py", "--learning_rate", "3e-5", "--output_dir", "a b"]
    assert main(["import", "ds.json", "-o", "job.yaml", *command, "--max_steps", "10"]) == 0
    assert "job.yaml: " in capsys.readouterr().err
    assert main(["validate", "job.yaml"]) == 0
    document = parse((folder / "job.yaml").read_text(), "job.yaml").value
    assert document["output"]["dir"] == "a b"
    assert document["optimizer"]["params"]["lr"] == 3e-5


def test_a_file_is_replaced_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text("mine")
    assert main(["import", "ds.json", "-o", "job.yaml"]) == 2
    assert (folder / "job.yaml").read_text() == "mine"
    assert "job.yaml exists already" in capsys.readouterr().err
    assert main(["import", "ds.json", "-o", "job.yaml", "--force"]) == 0
    assert (folder / "job.yaml").read_text().startswith("# Made by dsjob import.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to import"),
        (["no.json"], "no such file"),
        (["--", "ls", "-l"], "ls -l is no launch command"),
        (["ds.json", "-o", "no/where/job.yaml"], "no such file or folder"),
        (["bad.json"], "bad.json:1:7: expected a value"),
        (["odd.json"], "--kind deepspeed|arguments|command|accelerate"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    (folder / "bad.json").write_text('{"a": ,}')
    (folder / "odd.json").write_text('{"a": 1}')
    assert main(["import", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_a_mistyped_command_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["imprt", "ds.json"]) == 2
    assert 'did you mean "import"?' in capsys.readouterr().err
