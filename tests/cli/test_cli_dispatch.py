"""Which command a line of words is, and how errors reach the user: text, exit code, traceback or none."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser

import dsjob
from dsjob import errors
from dsjob.cli import USAGE, main, parse_count
from dsjob.cli.flags import add_arguments
from dsjob.cli.run import make_help
from dsjob.errors import DocumentError, DsjobError, Interrupted, Problem, UsageError

COMMANDS = ["run", "validate", "show", "schema", "convert", "ckpt"]
SCRIPT = str(Path(sys.executable).with_name("dsjob"))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "folder").mkdir()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was called instead of a command: its name, its arguments, and whether to debug."""
    calls: list[Any] = []
    for name in COMMANDS:
        module = importlib.import_module(f"dsjob.cli.{name}")
        monkeypatch.setattr(module, "main", lambda words, debug, name=name: calls.append((name, words, debug)) or 7)
    return calls


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(words: list[str], debug: bool) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("dsjob.cli.show"), "main", fail)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_gets_the_words_after_it_and_gives_the_exit_code(called: list[Any], command: str) -> None:
    assert main([command, "a", "--b", "run"]) == 7
    assert called == [(command, ["a", "--b", "run"], False)]


@pytest.mark.parametrize(
    "words",
    [
        ["job.json"],
        ["./job.json", "trainer.seed=1"],
        ["folder"],
        ["+recipe=quickstart"],
        ["++model.x=1"],
        ["~scheduler"],
        ["trainer.seed=1", "job.json"],
        ["memory://job.json"],
        ["-m", "+recipe=quickstart"],
        ["--cfg", "job"],
    ],
)
def test_without_a_command_it_is_run(called: list[Any], words: list[str]) -> None:
    assert main(words) == 7
    assert called == [("run", words, False)]


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_the_flag_of_torch_distributed_launch_is_accepted(called: list[Any], flag: str) -> None:
    main([flag, "job.json", "trainer.seed=1"])
    assert called == [("run", ["job.json", "trainer.seed=1"], False)]


@pytest.mark.parametrize("words", [["--debug", "show", "x"], ["show", "--debug", "x"], ["show", "x", "--debug"]])
def test_debug_may_stand_anywhere(called: list[Any], words: list[str]) -> None:
    main(words)
    assert called == [("show", ["x"], True)]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == USAGE
    assert all(f"dsjob {command} " in USAGE or command == "run" for command in COMMANDS)


@pytest.mark.parametrize("command", ["validate", "show", "schema", "convert", "ckpt"])
def test_each_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    for words in ([command, "--help"], ["help", command]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert f"usage: dsjob {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exec"], "dsjob exec needs PROGRAM\n"),
        (["exec", "--num_gpus", "2"], "dsjob exec needs PROGRAM\n"),
        (["ckpt", "ls"], "dsjob ckpt ls needs CKPT\n"),
        (["init", "a", "b"], "dsjob init: unrecognized arguments: b\n"),
        (["help", "exce"], "unknown command 'exce'\n  did you mean \"exec\"?\n"),
    ],
)
def test_wrong_arguments_are_told_like_other_errors(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"dsjob: error: {said}")


@pytest.mark.parametrize("words", [["run", "--help"], ["run", "cfg.yaml", "-h"], ["+recipe=quickstart", "--help"]])
def test_help_of_run_explains_it(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: dsjob [run]")
    assert "  dsjob run outputs/mine" in shown


def test_help_of_run_lists_flags_that_run_takes() -> None:
    taken = get_args_parser()
    add_arguments(taken)
    listed = {name for action in make_help()._actions for name in action.option_strings}
    assert len(listed) > 15
    # `dsjob.cli` takes these.
    assert listed - set(taken._option_string_actions) == {
        "--debug",
        "--quiet",
        "-q",
        "--json",
        "--smoke",
        "--smoke-only",
    }


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsjob {dsjob.__version__}\n"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("vaildate", "unknown command or file 'vaildate'\n  did you mean \"validate\"?"),
        ("shwo", 'did you mean "show"?'),
        ("zzz", "unknown command or file 'zzz'\n  dsjob --help lists the commands"),
        ("quickstat", "did you mean the recipe quickstart? dsjob +recipe=quickstart"),
        ("gone.json", "no such file: gone.json"),
        ("gone.yaml", "no such file: gone.yaml"),
        ("there/jbo.json", 'no such file: there/jbo.json\n  did you mean "there/job.json"?'),
        ("their/job.json", 'no such file: their/job.json\n  did you mean "there/job.json"?'),
        ("gone/job", "no such file or run folder: gone/job"),
        ("--nope", "unrecognized arguments: --nope"),
    ],
)
def test_a_word_that_is_nothing_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/job.json").touch()
    assert main([word]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dsjob: error: ")
    assert said in printed.err


@pytest.mark.parametrize("words", [["run"], ["plan"], ["-m"], ["run", "--config-dir", "."]])
def test_a_command_without_a_document_says_what_it_needs(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    command = "plan" if words == ["plan"] else "run"
    needed = f"dsjob: error: dsjob {command} needs a file, a run's folder or a recipe\n  dsjob {command} cfg.yaml, "
    assert printed.err.startswith(needed)


def test_an_empty_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([""]) == 2
    assert "Traceback" not in capsys.readouterr().err


# ---- errors


@pytest.mark.parametrize(
    "error",
    [
        UsageError("wrong", hint="do this"),
        Interrupted(15, "wrong", hint="do this"),
        *(
            kind("wrong", hint="do this")
            for kind in (errors.TargetError, errors.DataError, errors.StorageError, errors.CorruptCheckpointError)
        ),
        errors.LaunchError("wrong", hint="do this", exit_code=9),
    ],
)
def test_an_error_is_printed_with_its_hint_and_gives_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: DsjobError
) -> None:
    fail_with(monkeypatch, error)
    assert main(["show"]) == error.exit_code
    assert capsys.readouterr() == ("", "dsjob: error: wrong\n  do this\n")


def test_the_problems_of_a_document_are_printed_one_a_line_without_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [
        Problem("two", ("b",), source="j", line=2, column=1),
        Problem("one", ("a",), source="j", line=1, column=1),
    ]
    fail_with(monkeypatch, DocumentError(problems))
    assert main(["show"]) == 2
    assert capsys.readouterr().err == "j:1:1: error: a: one\nj:2:1: error: b: two\n"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, UsageError("wrong"))
    assert main(["show", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "UsageError: wrong" in err


def test_an_error_of_nobodys_is_told_in_one_line_with_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["show"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in err
    assert "run again with --debug for the traceback" in err
    assert "Traceback" not in err
    fail_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["show", "--debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["show"]) == 130
    assert capsys.readouterr().err == "dsjob: interrupted\n"


@pytest.mark.parametrize("words", [["--help"], ["show", "+recipe=quickstart"]])
def test_a_reader_that_goes_away_is_no_failure_to_talk_about(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([SCRIPT, *words], stdout=writer, stderr=subprocess.PIPE, env=env, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", [[SCRIPT], [sys.executable, "-P", "-m", "dsjob"]])
def test_the_script_and_the_module_are_the_same_command(command: list[str]) -> None:
    done = subprocess.run([*command, "vaildate"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert 'did you mean "validate"?' in done.stderr


@pytest.mark.parametrize("text", ["1", "64"])
def test_parse_count_takes_positive_numbers(text: str) -> None:
    assert parse_count(text) == int(text)
