"""What a run shows on terminals, wide and narrow, and with --quiet and --json."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import struct
import termios
import time
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import dsjob, make_job, read_metrics
from programs import DSJOB, Rank, clean_env
from rich.console import Console

from dsjob.training.display import Display, make_display
from dsjob.training.form import read_form, showing

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(step: int) -> dict[str, float]:
    speeds = {"samples_per_second": 80.0, "tokens_per_second": 0.0, "eta_seconds": 3725.0}
    return {"step": step, "epoch": 0.5, "loss": 1 / step, "lr": 0.1, "grad_norm": 1.0, **speeds}


def show(width: int, steps: int = 4) -> str:
    """What a terminal of this width receives, without its codes."""
    file = io.StringIO()
    display = Display(Console(file=file, force_terminal=True, width=width, _environ={}), shown=True)
    run: Any = SimpleNamespace(step=0, max_steps=8, expected_steps=8)
    display.on_start(run)
    for step in range(1, steps + 1):
        run.step = step
        display.on_log(run, record(step))
    display.on_end(run)
    return CODES.sub("", file.getvalue())


def test_log_lines_stay_above_the_bar() -> None:
    lines = show(110).splitlines()
    (first, *_, last) = [number for number, line in enumerate(lines) if line.startswith("step ")]
    assert lines[first].startswith("step 1/8  12%  loss 1.0000  lr 1.0e-01  grad 1.00  80 samples/s  eta 1:02:05")
    assert lines[last].startswith("step 4/8  50%  loss 0.2500")
    assert "━" in lines[-1]
    assert "4/8" in lines[-1]
    assert "█▄▂▁" in lines[-1] or "█▃▂▁" in lines[-1]
    assert lines[-1].rstrip().endswith("eta 1:02:05")


@pytest.mark.parametrize("width", [20, 24, 40, 59, 60, 80])
def test_a_narrow_terminal_keeps_step_and_time(width: int) -> None:
    bar = show(width).splitlines()[-1].rstrip()
    assert len(bar) <= width
    assert re.search(r"4/8 +(▁|█|▂|▃|▄|▅|▆|▇| )*eta 1:02:05$", bar), bar


def test_the_curve_is_that_of_the_whole_run() -> None:
    assert "█" in show(100, steps=2000).splitlines()[-1]


def run_on_terminal(folder: Path, *words: str, width: int = 100, **env: str) -> str:
    """What `dsjob` writes to a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    command = [DSJOB, "cfg.json", *words]
    environment = clean_env(TERM="xterm-256color", **env)
    with contextlib.chdir(folder):
        process = Rank(command, environment, theirs)
    os.close(theirs)
    found, began = b"", time.monotonic()
    while time.monotonic() - began < 100:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                found += os.read(ours, 65536)
            except OSError:  # the process has closed its end
                break
        elif process.poll() is not None:
            break
    os.close(ours)
    assert process.wait(10) == 0, found.decode()
    return found.decode()


def test_colours_can_be_turned_off(tmp_path: Path) -> None:
    make_job(tmp_path)
    colour = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|9[0-7])(?:;[0-9]+)*m")
    shown = run_on_terminal(tmp_path)
    assert colour.search(shown)
    plain = run_on_terminal(tmp_path, "output.dir=other", NO_COLOR="1")
    assert not colour.search(plain)
    for text in (shown, plain):
        assert len(re.findall(r"[\r\n]step \d/6", CODES.sub("", text))) == 6


@pytest.mark.parametrize("nproc", [1, 2])
def test_json_is_one_object_on_each_line(tmp_path: Path, nproc: int) -> None:
    make_job(tmp_path, launch={"nproc": nproc})
    done = dsjob("cfg.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events][:2] == ["start", "log"]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "log"}
    assert losses == read_metrics(tmp_path / "run")
    assert {"eval", "save", "message"} <= {event["event"] for event in events}
    assert events[-1]["event"] == "result"
    assert (events[-1]["status"], events[-1]["step"]) == ("done", 6)


@pytest.mark.parametrize("nproc", [1, 2])
def test_quiet_prints_nothing(tmp_path: Path, nproc: int) -> None:
    make_job(tmp_path, launch={"nproc": nproc})
    done = dsjob("run", "-q", "cfg.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "dsjob" not in done.stderr  # torch may warn
    assert list(read_metrics(tmp_path / "run")) == [*range(1, 7)]


def test_quiet_shows_problems_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with showing("quiet"):
        display = make_display(shown=True)
    display.say("note", "fine")
    display.say("not saved", "the disk is full")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "dsjob: not saved: the disk is full\n")
    make_job(tmp_path)
    done = dsjob("cfg.json", "--quiet", "model._target_=my_model.Crash", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "shapes do not fit" in done.stderr


def test_both_forms_at_once_are_refused(tmp_path: Path) -> None:
    make_job(tmp_path)
    done = dsjob("cfg.json", "--quiet", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert "not allowed with" in done.stderr


def test_the_form_ends_with_its_block() -> None:
    with showing("json"):
        with showing(""):
            assert read_form() == ""
        assert read_form() == "json"
    assert read_form() == ""
