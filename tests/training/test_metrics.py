"""Metrics over the whole evaluation set: the closed form, whatever the micro batch, the ranks and the metric's form."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import metric_jobs
import pytest
import torch
from job_documents import find_problems
from metric_jobs import METRICS, Rare, expect, make_document, run, run_each
from ranks import run_ranks

from dsjob.errors import ContractError
from dsjob.ranks.mesh import World

CASES = [(n, micro) for n, micro in itertools.product((37, 2), (16, 4, 3))]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3))])
def test_a_metric_sees_each_sample_once(tmp_path: Path, world_size: int) -> None:
    """In 2 samples there is no batch for some ranks: what pads them counts nowhere."""
    pytest.importorskip("evaluate")
    module = {"_target_": "metric_jobs.make_of_evaluate", "folder": str(tmp_path), "_partial_": False}
    classes = {**module, "inputs": {"predictions": "outputs.logits", "references": "batch.labels"}}
    metrics = {**METRICS, "hf": classes}
    given = [{"n": n, "trainer": {"micro_batch": micro}, "metrics": metrics} for n, micro in CASES]
    for (n, _), lines in zip(CASES, run_ranks(run_each, world_size, str(tmp_path), given)[0], strict=True):
        evaluations = [line for line in lines if "eval/loss" in line]
        assert len(evaluations) == 2
        for found in evaluations:
            expected = expect(Rare(n))
            for name, value in {**expected, "hf": expected["values"], "loss_mean": found["eval/loss"]}.items():
                close = 1e-6 if name != "loss_mean" or n % 4 == 0 else 1.0
                assert found[f"eval/{name}"] == pytest.approx(value, abs=close), (n, name)


TRAINED = {
    "trained": {**METRICS["own"], "phases": ["train", "eval"]},
    "seen": {**METRICS["order"], "phases": ["train"]},
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_metrics_see_the_batches_between_two_records(tmp_path: Path, world_size: int) -> None:
    trainer = {"micro_batch": 2, "train_batch": 8, "max_steps": 5, "log_every": 2, "eval_every": 3}
    given = [{"trainer": trainer, "metrics": TRAINED, "data": {**DATA, "shuffle": False}}]
    lines = run_ranks(run_each, world_size, str(tmp_path), given)[0][0]
    records = [line for line in lines if "loss" in line]
    data, begin = Rare(), 0
    assert [line["step"] for line in records] == [2, 3, 4, 5]  # an evaluation comes after a record
    for record in records:
        end = record["step"] * 8
        index = [number % len(data) for number in range(begin, end)]
        labels, begin = data.labels[index], end
        counts = metric_jobs.count(data.x[index], labels)
        assert record["train/trained/f1"] == pytest.approx(metric_jobs.to_f1(counts), abs=1e-9)
        assert record["train/seen"] == metric_jobs.spell([labels.tolist()])
    evaluations = [line for line in lines if "eval/loss" in line]
    assert [line["eval/trained/f1"] for line in evaluations] == [expect(data)["own/f1"]] * 2
    assert not any("eval/seen" in line for line in evaluations)


DATA = {"train": {"_target_": "metric_jobs.Rare"}, "eval": {"_target_": "metric_jobs.Rare"}}


def test_a_loss_or_metric_that_is_a_module_is_where_the_model_is(tmp_path: Path) -> None:
    metric_jobs.DEVICES.clear()
    placed = {"_target_": "metric_jobs.Placed"}
    run(make_document(str(tmp_path), loss=placed, metrics={"placed": placed}))
    assert [torch.device("cpu")] * 2 == metric_jobs.DEVICES


def fail(world: World, folder: str, metric: dict[str, Any]) -> str:
    try:
        run_each(world, folder, [{"metrics": {"f1": metric}}])
    except ContractError as error:
        return f"{error.message} {error.hint}"
    return ""


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ({"_target_": "metric_jobs.Fails"}, "metrics.f1: ZeroDivisionError: no positives"),
        ({"_target_": "metric_jobs.ByClass"}, "metrics.f1 is a Tensor of shape [2], not a number return one number"),
        (
            {"_target_": "metric_jobs.F1", "inputs": {"preds": "outputs.scores", "target": "batch.labels"}},
            "metrics.f1.inputs.preds: outputs, of type dict, has no 'scores', but loss, logits",
        ),
        (
            {"_target_": "torchmetrics.MeanMetric"},
            "metrics.f1: unknown argument value of update(value, weight) metrics.f1.inputs: {value:",
        ),
    ],
)
def test_what_a_metric_gets_wrong_is_told_on_all_ranks(tmp_path: Path, metric: dict[str, Any], told: str) -> None:
    for found in run_ranks(fail, 2, str(tmp_path), metric):
        assert found.startswith(told)


def test_several_models_give_their_metrics_what_the_steps_return(tmp_path: Path) -> None:
    steps = {"step": {"_target_": "metric_jobs.train"}, "eval_step": {"_target_": "metric_jobs.judge"}}
    f1 = {"_target_": "metric_jobs.F1", "inputs": {"preds": "outputs.scores", "target": "batch.labels"}}
    given = {"models": {"one": {"model": {"_target_": "metric_jobs.Judged"}}}, "model": None}
    *_, last = run(
        make_document(str(tmp_path), trainer=steps, metrics={"f1": {**f1, "phases": ["eval", "train"]}}, **given)
    )
    assert last["eval/f1"] == expect(Rare())["own/f1"]
    assert {name for name in last if name.startswith("eval/")} == {"eval/loss", "eval/f1", "eval/f1/positives"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"inputs": {"preds": "logits"}}, "logits"),
        ({"inputs": {}}, "inputs"),
        ({"phases": ["test"]}, "test"),
        ({"reduce": "sum"}, "reduce"),
    ],
)
def test_mistakes_in_the_section_are_found_before_a_run(change: dict[str, Any], told: str) -> None:
    (problem, *_) = find_problems(make_document("run", metrics={"f1": {"_target_": "metric_jobs.F1", **change}}))
    assert problem.path[:2] == ("metrics", "f1")
    assert told in str(problem)
