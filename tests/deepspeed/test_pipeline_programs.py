"""The manual's examples of pipelines as programs, which run unmodified on two ranks with the losses of one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import DSJOB, clean_env, run_program

PROGRAMS = Path(__file__).parent / "programs"
STEPS, FEW = 20, 3


def run(folder: Path, program: str, ranks: int, *arguments: str, by_torchrun: bool = False) -> list[float]:
    """The losses of `dsjob exec`; or of torchrun, for which the program imports dsjob.deepspeed by that name."""
    folder.mkdir()
    shutil.copy(PROGRAMS / program, folder)
    command = [DSJOB, "exec", "--nproc", str(ranks)]
    if by_torchrun:
        text = (PROGRAMS / program).read_text().replace("from deepspeed", "from dsjob.deepspeed")
        (folder / program).write_text(text.replace("import deepspeed\n", "import dsjob.deepspeed as deepspeed\n"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = run_program([*command, program, *arguments], cwd=folder)
    assert done.returncode == 0, done.stderr
    return read(folder)


def read(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


def run_on_deepspeed(folder: Path, program: str, *arguments: str) -> list[float]:
    """The losses of the installed DeepSpeed, on two ranks."""
    folder.mkdir()
    environment = clean_env(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [*command, str(PROGRAMS / program), *arguments]
    done = subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return read(folder)


SMALL = ("--width", "4", "--size", "63")
CASES = [
    pytest.param("pipe_gpt.py", (), False, FEW, id="gpt"),
    pytest.param("pipe_gpt.py", (), True, STEPS, id="gpt-torchrun"),
    pytest.param("pipe_gpt.py", ("--recompute", "0"), False, STEPS, id="gpt-kept"),
    pytest.param("pipe_alexnet.py", SMALL, False, STEPS, id="alexnet"),
    pytest.param("pipe_alexnet.py", SMALL, True, STEPS, id="alexnet-torchrun"),
    pytest.param("pipe_alexnet.py", (), False, 4, id="alexnet-whole"),
    pytest.param("pipe_schedule.py", (), False, STEPS, id="schedule"),
    pytest.param("pipe_schedule.py", (), True, STEPS, id="schedule-torchrun"),
]


@pytest.mark.parametrize(("program", "arguments", "by_torchrun", "steps"), CASES)
@pytest.mark.full(*(case.id for case in CASES if case.id != "gpt"))
def test_a_program_of_the_manual_has_the_losses_of_one_process(
    tmp_path: Path, program: str, arguments: tuple[str, ...], by_torchrun: bool, steps: int
) -> None:
    given = (*arguments, "--steps", str(steps))
    none = ("--own", "none") if program == "pipe_schedule.py" else ()
    alone = run(tmp_path / "alone", program, 1, *given, *none, "--stages", "1")
    assert run(tmp_path / "two", program, 2, *given, by_torchrun=by_torchrun) == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.01


@pytest.mark.full
def test_the_manuals_schedule_of_data_parallelism(tmp_path: Path) -> None:
    """On two ranks, each with the whole model."""
    given = ("--stages", "1", "--steps", str(STEPS))
    alone = run(tmp_path / "alone", "pipe_schedule.py", 1, *given, "--own", "none")
    assert run(tmp_path / "two", "pipe_schedule.py", 2, *given, "--own", "manual") == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "arguments"),
    [("pipe_gpt.py", ("--partition", "uniform", "--recompute", "0")), ("pipe_alexnet.py", SMALL)],
)
def test_a_program_has_the_losses_of_deepspeed(tmp_path: Path, program: str, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("deepspeed")
    # DeepSpeed clips by a norm that counts only the first stage's parameters, so its losses depend on the stages.
    given = (*arguments, "--steps", str(STEPS), "--clip", "0")
    theirs = run_on_deepspeed(tmp_path / "theirs", program, *given)
    assert run(tmp_path / "ours", program, 2, *given) == pytest.approx(theirs, rel=1e-5)
