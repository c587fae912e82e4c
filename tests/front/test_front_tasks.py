"""`dsjob.evaluate` and `dsjob.predict`, and their commands: they use a checkpoint with the job that saved it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import dsjob as run_command
from jobs import make_job
from programs import DSJOB, run_program

import dsjob
from dsjob import errors

DATA = {"train": {"_target_": "my_model.Data"}, "eval": {"_target_": "my_model.Data", "n": 13, "seed": 1}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    trainer = {"train_batch": 8, "max_steps": 2, "log_every": 1, "eval_every": 1}
    folder = make_job(
        tmp_path_factory.mktemp("trained"),
        data=DATA,
        trainer=trainer,
        zero_optimization={"stage": 3},
        checkpoint={"every": 1},
        callbacks={"ema": {"_target_": "dsjob.callbacks.EMA", "decay": 0.5}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        dsjob.run("cfg.json")
    sys.modules.pop("my_model", None)
    yield folder
    sys.modules.pop("my_model", None)


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def read_losses() -> dict[int, float]:
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_is_evaluated_on_any_number_of_ranks(folder: Path, ranks: int) -> None:
    for step, loss in read_losses().items():
        found = dsjob.evaluate(
            "run", tag=f"step-{step:08d}", overrides=[f"launch.nproc={ranks}", "trainer.micro_batch=2"]
        )
        assert found.metrics == {"eval/loss": pytest.approx(loss, rel=1e-5)}
        assert found.step == step
        assert found.run_dir == f"run/eval-step-{step:08d}"
        written = json.loads(Path(found.run_dir, "result.json").read_text())
        assert (written["status"], written["metrics"]) == ("done", dict(found.metrics))
    assert not Path("run/logs").exists()


def test_a_folder_of_checkpoints_and_one_of_them_can_be_named(folder: Path, tmp_path: Path) -> None:
    losses, (first,) = read_losses(), sorted(Path("run/checkpoints").glob("step-00000001-a*"))
    out = f"output.dir={tmp_path}/out"
    for place, step in (("run/checkpoints", 2), (first, 1), (folder / "run", 2)):
        assert dsjob.evaluate(place, overrides=[out]).metrics["eval/loss"] == pytest.approx(losses[step], rel=1e-5)


def test_another_set_can_be_evaluated(folder: Path, tmp_path: Path) -> None:
    changes = ["~data.eval", "+data.eval.other._target_=my_model.Data", "+data.test._target_=my_model.Data"]
    changes.append("checkpoint.best.metric=eval/gone/loss")  # of a set that is not evaluated: nothing is chosen by it
    found = dsjob.evaluate("run", overrides=[*changes, f"output.dir={tmp_path}/out"])
    assert list(found.metrics) == ["eval/other/loss", "test/loss"]


def test_a_checkpoint_from_elsewhere_imports_only_what_is_trusted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run" / "checkpoints", tmp_path / "copied")
    out = [f"output.dir={tmp_path}/out"]
    with pytest.raises(errors.DocumentError, match=r"my_model\.build is not trusted"):
        dsjob.evaluate(tmp_path / "copied", overrides=out)
    found = dsjob.evaluate(tmp_path / "copied", overrides=out, trust=["my_model"])
    assert found.metrics["eval/loss"] == pytest.approx(read_losses()[2], rel=1e-5)
    assert found.run_dir == f"{tmp_path}/out"


def test_averages_are_used_if_asked(folder: Path, tmp_path: Path) -> None:
    model = dsjob.load_model("run", ema=True)
    import my_model

    x, y = (torch.stack(each) for each in zip(*my_model.Data(13, seed=1), strict=True))
    expected, weights = float(model(x, y).detach()), read_losses()[2]
    assert abs(expected - weights) > 1e-3 * weights
    out = f"output.dir={tmp_path}/out"
    found = dsjob.evaluate("run", ema=True, overrides=[out, "launch.nproc=2"])
    assert found.metrics["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["ema"] is True
    for flags, which in (([], "its weights, not their averages"), (["--ema"], "the averages of its weights")):
        done = run_command("eval", "run", out, *flags, cwd=folder, COLUMNS="300")
        assert which in done.stdout + done.stderr


def test_the_command_prints_metrics_and_the_result(folder: Path) -> None:
    done = run_command("eval", "run", "-t", "step-00000001", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"eval  eval/loss {read_losses()[1]:.4f}" in done.stdout
    assert done.stdout.splitlines()[-1] == "result  run/eval-step-00000001/result.json"
    told = run_command("eval", "run", "-t", "step-00000001", "--json", cwd=folder).stdout
    lines = [json.loads(line) for line in told.splitlines()]
    assert lines[-1]["event"] == "result"
    assert lines[-1]["metrics"]["eval/loss"] == pytest.approx(read_losses()[1])
    assert run_command("eval", "run", "--quiet", cwd=folder).stdout == ""


def test_torchrun_evaluates(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB]
    done = run_program([*torchrun, "eval", "run", f"output.dir={folder}/joined"], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"eval/loss {read_losses()[2]:.4f}") == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "dsjob eval needs a run's folder or a checkpoint"),
        (["run", "cfg.json"], 2, "dsjob eval needs one checkpoint, not run, cfg.json"),
        (["nowhere"], 1, "no such folder"),
        (["run", "--tag", "step-00000009"], 1, "step-00000009"),
        (["run", "~data.eval"], 2, "tasks: eval needs data.eval or data.test"),
        (["run", "trainer.micro_bach=2"], 2, "did you mean"),
        (["cfg.json"], 1, "cfg.json"),
    ],
)
def test_mistakes_are_told(folder: Path, words: list[str], code: int, message: str) -> None:
    done = run_command("eval", *words, cwd=folder)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_a_checkpoint_without_a_job_is_refused(folder: Path, tmp_path: Path) -> None:
    place: Any = shutil.copytree(folder / "run" / "checkpoints", tmp_path / "copied")
    for copy in Path(place).glob("*/job.json"):
        copy.unlink()
    with pytest.raises((errors.UsageError, errors.CorruptCheckpointError)):
        dsjob.evaluate(place)


OUTPUTS = "+predict.outputs.y=batch.1"


def test_predictions_are_those_of_the_checkpoint_on_any_number_of_ranks(folder: Path) -> None:
    """my_model returns its loss alone, so what is written comes from the batch."""
    files = []
    for ranks in (1, 2):
        changes = [OUTPUTS, f"launch.nproc={ranks}", "trainer.micro_batch=3", f"predict.dir=out{ranks}"]
        found = dsjob.predict("run", overrides=changes)
        assert found.files == [f"out{ranks}/predictions-eval.jsonl"]
        assert (found.step, found.run_dir) == (2, "run/predict-step-00000002")
        files.append(Path(found.files[0]).read_bytes())
    assert files[0] == files[1]
    assert [json.loads(line)["index"] for line in files[0].splitlines()] == list(range(13))


def test_the_command_prints_the_files(folder: Path) -> None:
    done = run_command("predict", "run", "predict.outputs={y: batch.1}", "predict.format=safetensors", cwd=folder)
    assert done.returncode == 0, done.stderr
    file = "run/predict-step-00000002/predictions-eval.safetensors"
    assert f"predicted  data.eval  {file}" in done.stdout
    assert (folder / file).exists()


def test_a_model_without_logits_is_told(folder: Path) -> None:
    done = run_command("predict", "run", cwd=folder)
    assert done.returncode == 1
    assert "logits is a tensor of shape []" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_weights_than_those_of_the_checkpoint_are_an_error(folder: Path) -> None:
    with pytest.raises(errors.UsageError, match=r"checkpoint\.resume=other: dsjob eval uses the checkpoint that it is"):
        dsjob.evaluate("run", overrides=["checkpoint.resume=other"])
