"""Which values of a metric are better: that the best checkpoint is not the worst one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import directed
import pytest
import small_jobs
import torchmetrics
from job_documents import resolve
from ranks import run_ranks

from dsjob.contract.directions import falls
from dsjob.contract.spec import JobSpec, view
from dsjob.errors import ContractError
from dsjob.front.runs import describe
from dsjob.ranks.mesh import World
from dsjob.training.directions import find_direction

SMALL = {"_target_": "small_jobs.Data"}
EVALUATED = {"train": SMALL, "eval": SMALL}


def make(folder: Path, target: str, *, best: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    checkpoint = {"best": {"metric": "eval/score", **(best or {})}, "keep": 1, "load_best_at_end": True}
    metrics = {"score": {"_target_": target}}
    given = {"data": EVALUATED, "trainer": {"eval_every": 2}, "metrics": metrics, "checkpoint": checkpoint}
    return small_jobs.make_document(folder, **{**given, "callbacks": {}, **sections})


@pytest.mark.parametrize(("target", "step"), [("directed.Rising", 8), ("directed.Falling", 2)])
def test_a_metric_says_which_values_are_better(tmp_path: Path, target: str, step: int) -> None:
    small_jobs.run(make(tmp_path, target))
    result = json.loads((tmp_path / "result.json").read_text())
    values = {line["step"]: line.get("eval/score") for line in read_lines(tmp_path) if "eval/score" in line}
    assert (result["step"], result["best_step"]) == (8, step)
    assert f"step-{step:08d}" in result["checkpoint"]
    assert result["metrics"]["eval/score"] == values[step]
    resolved = json.loads((tmp_path / "resolved.json").read_text())
    assert resolved["checkpoint"]["best"]["mode"] == ("max" if step == 8 else "min")
    assert describe(str(tmp_path)).best == values[step]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_on_ranks(world: World, folder: str) -> None:
    small_jobs.run(make(Path(folder), "directed.Rising", trainer={"eval_every": 2, "train_batch": 8}), world)


def test_all_ranks_take_the_same_direction(tmp_path: Path) -> None:
    run_ranks(run_on_ranks, 2, str(tmp_path))
    assert json.loads((tmp_path / "result.json").read_text())["best_step"] == 8


def test_a_function_does_not_say_which_values_are_better(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="eval/score does not say whether lower or higher") as told:
        small_jobs.run(make(tmp_path, "directed.constant"))
    assert told.value.path == ("checkpoint", "best", "mode")
    assert not list(tmp_path.glob("checkpoints/step-*"))
    small_jobs.run(make(tmp_path, "directed.constant", best={"mode": "max"}))


def test_a_mode_that_contradicts_the_metric_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_jobs.run(make(tmp_path, "directed.Rising", best={"mode": "min"}))
    assert "checkpoint.best.mode is min, but of eval/score, higher values are better" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "last"), [("directed.Rising", 8), ("directed.Falling", 6)])
def test_early_stopping_takes_the_direction_from_the_metric(tmp_path: Path, target: str, last: int) -> None:
    early = {"_target_": "dsjob.callbacks.EarlyStopping", "metric": "eval/score", "patience": 2}
    small_jobs.run(make(tmp_path, target, best={"mode": "max"}, callbacks={"early": early}))
    assert max(small_jobs.read_losses(tmp_path)) == last


def test_early_stopping_refuses_a_metric_that_does_not_say_which_values_are_better(tmp_path: Path) -> None:
    early = {"_target_": "dsjob.callbacks.EarlyStopping", "metric": "eval/score"}
    with pytest.raises(ContractError, match="EarlyStopping: eval/score does not say"):
        small_jobs.run(make(tmp_path, "directed.constant", best={"mode": "max"}, callbacks={"early": early}))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("eval/loss", True),
        ("eval/news/loss", True),
        ("eval/loss/contrastive", True),
        ("eval/masked_lm_loss", True),
        ("eval/Perplexity", True),
        ("eval/word_error", True),
        ("eval/f1", False),
        ("eval/lossless", False),
        ("eval/error_f1", False),
    ],
)
def test_names_say_that_lower_values_are_better(metric: str, expected: bool) -> None:
    assert falls(metric) is expected


def test_a_resolved_document_says_that_a_loss_should_fall() -> None:
    document = small_jobs.make_document("run", data=EVALUATED, checkpoint={"best": {"keep": 2}})
    assert resolve(document)["checkpoint"]["best"] == {"metric": "eval/loss", "mode": "min", "keep": 2}
    assert document["checkpoint"]["best"] == {"keep": 2}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("eval/f1", "max"),
        ("eval/news/f1", None),
        ("eval/cer", "min"),
        ("eval/both/f1", "max"),
        ("eval/both/far", "min"),
        ("eval/both", None),
        ("eval/low", "min"),
        ("eval/constant", None),
        ("eval/f1x", None),
        ("eval/rouge/rouge1_fmeasure", "max"),
        ("eval/loss", "min"),
    ],
)
@pytest.mark.parametrize("sets", [("",), ("a", "b")])
def test_the_object_of_a_metric_is_found(metric: str, expected: str | None, sets: tuple[str, ...]) -> None:
    named = SMALL if sets == ("",) else dict.fromkeys(sets, SMALL)
    document = small_jobs.make_document("run", data={"train": SMALL, "eval": named})
    spec = view(JobSpec, resolve(document))
    metrics: dict[str, Any] = {
        "f1": torchmetrics.F1Score(task="binary"),
        "cer": torchmetrics.text.CharErrorRate(),
        "both": directed.make_collection(),
        "low": directed.count_low,
        "constant": directed.constant,
        "rouge": directed.Rising(),
    }
    whole = metric if sets == ("",) else metric.replace("eval/", "eval/b/")
    assert find_direction(whole, spec, metrics) == expected
