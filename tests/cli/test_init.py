"""`dsjob init`: what it writes works as it is; and what help and completion know of the commands."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import dsjob
from programs import run_program

from dsjob.cli import COMMANDS, main
from dsjob.cli.ckpt import EXAMPLES, parse_arguments
from dsjob.cli.init import FILES


@pytest.mark.slow
def test_the_project_is_valid_trains_and_passes_its_own_test(tmp_path: Path) -> None:
    made = dsjob("init", "mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "cd mine && dsjob job.yaml" in made.stdout
    folder = tmp_path / "mine"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == FILES.keys()
    checked = dsjob("validate", "--deep", "--strict", "job.yaml", cwd=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    trained = dsjob("job.yaml", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    assert "record  accuracy" in trained.stdout
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tested = run_program(command, cwd=folder)
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert ". already has job.yaml; nothing was written\n  use another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "below")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "new.yaml"])
def test_a_file_is_no_place_for_a_project(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / name)]) == 2
    assert f"{name} is not a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", [*COMMANDS, *(f"ckpt {name}" for name in EXAMPLES)])
def test_the_help_of_a_command_has_examples_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # argparse prints, and exits
        main([*command.split(), "--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:\n")
    lines = [line.strip() for line in examples.splitlines() if line]
    assert len(lines) >= 2
    assert all(line.startswith(("dsjob +", "dsjob cfg.yaml", "dsjob -m", f"dsjob {command}")) for line in lines[:2])


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_the_examples_of_ckpt_can_be_typed(example: str) -> None:
    assert parse_arguments(example.split()[2:]).action


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("dsjob ", set(COMMANDS)),
        ("dsjob va", {"validate"}),
        ("dsjob run trainer.max_s", {"trainer.max_steps="}),
        ("dsjob trainer.max_s", {"trainer.max_steps="}),
        ("dsjob +recipe=quick", {"+recipe=quickstart"}),
    ],
)
def test_completion_knows_commands_and_keys(tmp_path: Path, typed: str, expected: set[str]) -> None:
    done = dsjob("-sc", "query=bash", cwd=tmp_path, COMP_LINE=typed, COMP_POINT=str(len(typed)))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == expected
