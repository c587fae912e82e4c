"""`checkpoint.best` is visible: in the file `best`, in `dsjob ckpt ls`, with --best, and at the end of training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from jobs import dsjob as run_command
from ranks import run_ranks
from small_jobs import list_steps

import dsjob
from dsjob.checkpoint.offline.convert import read_weights
from dsjob.checkpoint.root.best import choose_tag
from dsjob.checkpoint.root.inventory import take_inventory
from dsjob.errors import NoCheckpointError, UsageError
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.usefixtures("hooks")

SMALL = {"_target_": "small_jobs.Data"}
BEST = {"best": {"mode": "max"}, "keep": 1}  # the loss falls, so the first evaluation is the best
SECTIONS: dict[str, Any] = {
    "data": {"train": SMALL, "eval": SMALL},
    "trainer": {"eval_every": 2},
    "checkpoint": BEST,
    "callbacks": {},
}


def read_marks(folder: Path) -> dict[int | None, tuple[bool, bool]]:
    return {entry.step: (entry.best, entry.newest) for entry in take_inventory(str(folder)).checkpoints}


@pytest.mark.parametrize("behind", [False, True])
def test_the_best_is_marked(tmp_path: Path, behind: bool) -> None:
    small_jobs.train(tmp_path, **{**SECTIONS, "checkpoint": {**BEST, "async": behind}})
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000002\n"
    assert read_marks(tmp_path) == {2: (True, False), 8: (False, True)}
    assert choose_tag(str(tmp_path), None, best=True) == "step-00000002"
    assert choose_tag(str(tmp_path), None, best=False) is None
    small_jobs.train(
        tmp_path, **{**SECTIONS, "checkpoint": {**BEST, "best": {"mode": "min"}}, "trainer": {"max_steps": 9}}
    )
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000009\n"
    assert read_marks(tmp_path) == {9: (True, True)}


def test_checkpoints_of_an_earlier_version_have_no_file_and_are_marked(tmp_path: Path) -> None:
    small_jobs.train(tmp_path, **SECTIONS)
    (tmp_path / "checkpoints" / "best").unlink()
    assert read_marks(tmp_path)[2] == (True, False)
    assert choose_tag(f"{tmp_path}/checkpoints", None, best=True) == "step-00000002"


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    small_jobs.train(tmp_path / "a", **{**SECTIONS, "checkpoint": {}})
    with pytest.raises(UsageError, match=r"has no best checkpoint: its job has no checkpoint\.best"):
        choose_tag(f"{tmp_path}/a", None, best=True)
    assert not (tmp_path / "a" / "checkpoints" / "best").exists()
    small_jobs.train(tmp_path / "b", **SECTIONS)
    (first,) = (tmp_path / "b" / "checkpoints").glob("step-00000002-a*")
    for place, tag in ((str(first), None), (f"{tmp_path}/b", "step-00000008")):
        with pytest.raises(UsageError):
            choose_tag(place, tag, best=True)
    for record in (tmp_path / "b" / "checkpoints" / "commits").iterdir():
        record.write_text(json.dumps({**json.loads(record.read_text()), "metrics": {}}))
    with pytest.raises(NoCheckpointError, match=r"has the metric of checkpoint\.best"):
        choose_tag(f"{tmp_path}/b", None, best=True)
    with pytest.raises(NoCheckpointError):
        choose_tag(f"{tmp_path}/none", None, best=True)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_jobs.train(tmp_path, **SECTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_best_selects_it_wherever_a_tag_does(trained: Path) -> None:
    expected = read_weights(str(trained), tag="step-00000002")
    found = dsjob.load_model(".", best=True, trust=["small_jobs"]).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    dsjob.convert(".", "api.safetensors", best=True)
    for words in (("convert", "--best", ".", "command.safetensors"), ("ckpt", "copy", "--best", ".", "copied")):
        done = run_command(*words, cwd=trained)
        assert done.returncode == 0, done.stderr
    assert Path("api.safetensors").read_bytes() == Path("command.safetensors").read_bytes()
    assert [entry.tag for entry in take_inventory("copied").checkpoints] == ["step-00000002"]
    for words in (("ckpt", "info", ".", "--best"), ("ckpt", "verify", ".", "--best")):
        done = run_command(*words, cwd=trained)
        assert (done.returncode, "step-00000002" in done.stdout) == (0, True), done.stderr
    assert "best" in run_command("ckpt", "ls", ".", cwd=trained).stdout
    for words, code in (((), 1), (("--tag", "step-00000002"), 0), (("copied",), 0)):
        done = run_command("ckpt", "diff", ".", *words, "--best", cwd=trained)
        assert (done.returncode, done.stderr) == (code, ""), words
    for words, code in ((("--best", "copied"), 0), (("--best", "copied", "more"), 2), (("--best", "--bets"), 2)):
        done = run_command("ckpt", "diff", ".", *words, cwd=trained)
        assert (done.returncode, "unrecognized" in done.stderr) == (code, code == 2), words
    script = trained / "checkpoints/zero_to_fp32.py"
    plain = subprocess.run([sys.executable, script, "--best"], capture_output=True, text=True, check=True)
    assert plain.stdout.startswith("step-00000002, step 2: ")
    done = run_command("ckpt", "verify", ".", "--best", "--tag", "step-00000002", cwd=trained)
    assert (done.returncode, "not allowed with" in done.stderr) == (2, True)
    evaluated = dsjob.evaluate(".", best=True, trust=["small_jobs"], overrides=["output.dir=evaluated"])
    assert evaluated.step == 2


def test_what_load_best_at_end_has_loaded_is_what_the_run_is_for_others(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wants the run's weights without naming a checkpoint gets the best; whoever resumes gets the newest."""
    at_end = {**SECTIONS, "checkpoint": {**BEST, "load_best_at_end": True}, "output": {"dir": "ended"}}
    small_jobs.train("ended", **at_end)
    best, newest = (read_weights("ended", tag=f"step-{step:08d}") for step in (2, 8))
    assert not torch.equal(best["fc.weight"], newest["fc.weight"])
    for source in ("ended", "ended/checkpoints"):
        found = dsjob.load_model(source, trust=["small_jobs"]).state_dict()
        assert torch.equal(found["fc.weight"], best["fc.weight"])
    found = dsjob.load_model("ended", tag="step-00000008", trust=["small_jobs"]).state_dict()
    assert torch.equal(found["fc.weight"], newest["fc.weight"])
    dsjob.convert("ended", "whole.safetensors")
    dsjob.convert("ended", "best.safetensors", best=True)
    assert Path("whole.safetensors").read_bytes() == Path("best.safetensors").read_bytes()
    assert dsjob.evaluate("ended", trust=["small_jobs"], overrides=["output.dir=evaluated"]).step == 2
    small_jobs.train("warm", **{**SECTIONS, "checkpoint": {"resume": "./ended"}, "trainer": {"max_steps": 1}})
    (started,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warm start")]
    assert "checkpoints/step-00000002" in started
    dsjob.convert("ended", "ds", to="deepspeed", zero_stage=1, world_size=1)
    assert Path("ds/latest").read_text() == "global_step8"
    small_jobs.train("ended", **{**at_end, "trainer": {"eval_every": 2, "max_steps": 10}})
    assert json.loads(Path("ended/metrics.jsonl").read_text().splitlines()[-1])["step"] == 10
    assert list_steps("ended") == [2, 10]


def train_and_evaluate(world: World, folder: str, stage: int) -> None:
    ends = {"checkpoint": {**BEST, "load_best_at_end": True}, "tasks": ["train", "eval"]}
    data = {"train": SMALL, "eval": SMALL, "test": SMALL}
    zero = {"stage": stage}
    trainer = {"eval_every": 2, "train_batch": 12}
    document = small_jobs.make_document(
        folder, **{**SECTIONS, **ends, "data": data, "trainer": trainer}, zero_optimization=zero
    )
    small_jobs.run(document, world)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3), (3, 0)])
def test_the_tasks_after_training_use_the_best_weights(tmp_path: Path, world_size: int, stage: int) -> None:
    run_ranks(train_and_evaluate, world_size, str(tmp_path), stage)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    result = json.loads((tmp_path / "result.json").read_text())
    assert losses[2] == max(losses.values())
    assert result["metrics"]["eval/loss"] == pytest.approx(losses[2], rel=1e-6)
    assert result["metrics"]["test/loss"] == pytest.approx(losses[2], rel=1e-6)
    assert "step-00000002" in result["checkpoint"]
    assert (result["step"], result["best_step"]) == (8, 2)
