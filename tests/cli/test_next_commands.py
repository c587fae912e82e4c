"""The commands that dsjob prints, pasted into bash as they are: for folders with any name."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from jobs import dsjob, list_commits, make_job, read_metrics

# Pasted into a shell without quotes, each would create the file PWNED, or name another folder.
NAMES = [
    "it's new\nline; touch PWNED #$(touch PWNED)",
    '-dash "q"\t\x1b[31m',
    *(pytest.param(name, marks=pytest.mark.full) for name in ("a b; touch PWNED #", "`touch PWNED`", "plain")),
]
# Stands in for the command: writes its arguments, each with an end that no name contains.
RECORD = "dsjob() { printf '%s\\0' \"$@\"; }\n"


def paste(command: str, folder: Path) -> list[str]:
    """The arguments that dsjob gets where a line is pasted into bash."""
    done = subprocess.run(["bash", "-c", RECORD + command], cwd=folder, capture_output=True, check=True)
    assert not (folder / "PWNED").exists()
    return os.fsdecode(done.stdout).split("\0")[:-1]


def read_next(output: str) -> dict[str, str]:
    """The lines below `next`."""
    lines = output.partition("\nnext\n")[2].splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_after_a_run_can_be_pasted(tmp_path: Path, name: str) -> None:
    make_job(tmp_path, output={"dir": name}, trainer={"train_batch": 8, "max_steps": 2})
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    commands = read_next(done.stdout)
    assert list(commands) == ["continue", "convert", "repeat", "sweep"]
    run = tmp_path / name
    for what, command in commands.items():
        arguments = paste(command, tmp_path)
        done = dsjob(*arguments, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        if what == "continue":
            assert max(read_metrics(run)) == 4
            assert len(list_commits(run)) == 2
        if what == "convert":
            assert (run / "weights").is_dir()
        if what == "repeat":
            (repeated,) = (path for path in tmp_path.iterdir() if path.name.startswith(f"{name}-2"))
            assert max(read_metrics(repeated)) == 4


def find_commands(text: str) -> list[str]:
    """The commands in a message, each to the end of its line."""
    return re.findall(r"dsjob (?!exec:|error:).+", text)


@pytest.mark.parametrize("name", NAMES[:3])
def test_hints_can_be_pasted(tmp_path: Path, name: str) -> None:
    """Each names the folder or file, as one word."""
    make_job(tmp_path, output={"dir": name}, trainer={"train_batch": 8, "max_steps": 1})
    path = f"./{name}" if name.startswith("-") else name
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 0
    (tmp_path / f"{name}.json").write_text('{"train_batch_size": 1}')
    (tmp_path / f"{name}.py".lstrip("-")).write_text("")
    hints = {
        "resumed elsewhere": dsjob("run", path, "output.dir=other", cwd=tmp_path).stderr,
        "a folder inside": dsjob("run", f"{path}/checkpoints", cwd=tmp_path).stderr,
        "a config": dsjob("run", f"{path}.json", cwd=tmp_path).stderr,
        "a program": dsjob(f"{name}.py".lstrip("-"), cwd=tmp_path).stderr,
        "a folder": dsjob("validate", path, cwd=tmp_path).stderr,
        "finished": dsjob("cfg.json", cwd=tmp_path).stdout,
        "a document as a program": dsjob("exec", f"{path}.json", cwd=tmp_path).stderr,
        "initialised": dsjob("init", f"{path} new", cwd=tmp_path).stdout,
    }
    for what, text in hints.items():
        if what == "initialised":
            lines = [line.split(maxsplit=1)[1] for line in text.partition("next\n")[2].splitlines()]
            entered = f"{lines[0].partition('&&')[0]}&& pwd"
            found = subprocess.run(["bash", "-c", entered], cwd=tmp_path, capture_output=True, check=True)
            assert Path(os.fsdecode(found.stdout).removesuffix("\n")) == tmp_path / f"{name} new"
            continue
        commands = find_commands(text)
        assert commands, (what, text)
        words = [paste(re.split(r" \.\.\.|; (?!touch)", command)[0], tmp_path) for command in commands]
        # In an override, Hydra has quotes of its own.
        shown = [os.path.normpath(word.replace("\\'", "'")) for each in words for word in each]
        assert any(name.lstrip("-") in word for word in shown), (what, words)
