"""The same mistake ends every command with the same exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsjob.cli import main

DOCUMENTS = ("run", "validate", "show", "plan", "import", "compare-engines")
COMPOSING = ("run", "validate", "show", "plan", "compare-engines")
CHECKPOINTS = (["convert"], ["convert", "--to", "hf"], *(["ckpt", name] for name in ("ls", "info", "verify", "gc")))


def call(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as error:  # argparse's
        return int(str(error.code))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("unknown.json").write_text('{"trainer": {"max_stps": 1}}')


@pytest.mark.parametrize("command", DOCUMENTS)
@pytest.mark.parametrize("mistake", ["nowhere.json", "broken.json", "--nonsense"])
def test_a_document_or_flag_that_is_wrong_is_2(command: str, mistake: str) -> None:
    assert call(command, mistake) == 2


@pytest.mark.parametrize("command", COMPOSING)
def test_a_key_that_is_wrong_is_2(command: str) -> None:
    assert call(command, "unknown.json") == 2


@pytest.mark.parametrize("command", CHECKPOINTS, ids=" ".join)
def test_a_checkpoint_that_is_not_there_is_1(command: list[str]) -> None:
    assert call(*command, "nowhere", *(["out"] if "convert" in command else [])) == 1


@pytest.mark.parametrize("command", CHECKPOINTS, ids=" ".join)
def test_a_flag_that_is_not_there_is_2(command: list[str]) -> None:
    assert call(*command, "nowhere", "--nonsense") == 2
