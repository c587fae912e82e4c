"""A Trainer of the user's: parts that compute the same give the same, at every stage and number of ranks."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import multilabel
import pytest
import small_jobs
import token_jobs
import torch
import trainer_parts
from engines import make_engine
from job_documents import find_problems
from ranks import run_ranks

import dsjob
from dsjob.checkpoint.offline.convert import read_weights
from dsjob.errors import ContractError
from dsjob.ranks.mesh import World
from dsjob.training.trainer import METHODS

CLOSE = {"rtol": 0.0, "atol": 1e-6}
PARTS = ("OwnLoss", "OwnStep", "WrappedStep", "OwnOptimizer", "OwnData", "OwnRun", "All")


def make_document(folder: str, parts: str, *, size: int, stage: int, **more: Any) -> dict[str, Any]:
    document = token_jobs.make_document(
        folder, micro_batch=size, stage=stage, trainer={"parts": {"_target_": f"trainer_parts.{parts}", **more}}
    )
    if parts == "OwnRun":
        document["checkpoint"]["best"] = {"metric": "eval/mine", "mode": "min"}
    return document


def run_all(world: World, folder: str, stages: tuple[int, ...]) -> dict[Any, Any]:
    found = {}
    for parts in PARTS:
        for stage in stages if parts == "All" else (stages[0], stages[-1])[: len(stages)]:
            trainer_parts.CALLED.clear()
            job = make_document(f"{folder}/{parts}-{stage}", parts, size=2, stage=stage)
            found[parts, stage] = (*token_jobs.run(job, world), set(trainer_parts.CALLED))
    return found


@pytest.mark.parametrize(("ranks", "stages"), [(1, (0,)), (2, (0, 1, 2, 3))])
@pytest.mark.full("2-stages1")
def test_parts_that_compute_the_same_give_the_same(tmp_path: Path, ranks: int, stages: tuple[int, ...]) -> None:
    """With accumulation: 4 or 2 micro batches of 2, with unlike numbers of targets."""
    losses, norms, evaluated, weights = token_jobs.train_by_hand()
    called: set[str] = set()
    for rank, results in enumerate(run_ranks(run_all, ranks, str(tmp_path), stages)):
        for (parts, stage), (found, ends, calls) in results.items():
            called |= calls
            assert calls, parts
            for name, weight in weights.items():
                torch.testing.assert_close(ends[name], weight, **CLOSE, msg=f"{parts} {stage} {name}")
            if rank == 0:
                *records, last = found
                assert [line["loss"] for line in records] == pytest.approx(losses, abs=1e-6), (parts, stage)
                assert [line["grad_norm"] for line in records] == pytest.approx(norms, abs=1e-6), (parts, stage)
                assert last["eval/loss"] == pytest.approx(evaluated, abs=1e-6), (parts, stage)
                assert (
                    [line["double"] for line in records] == pytest.approx([2 * loss for loss in losses], abs=1e-6)
                    if parts in ("OwnRun", "All")
                    else True
                )
                assert [line["samples"] for line in records] == [2.0] * 3 if parts == "WrappedStep" else True
    assert called == set(METHODS) - {"prediction_step", "predict", "get_test_dataloader"} | {"prediction_step"}


def run_tasks(world: World, folder: str) -> None:
    job = make_document(folder, "All", size=2, stage=3)
    job |= {"tasks": ["train", "eval", "predict"], "metrics": {"hits": {"_target_": "trainer_parts.accuracy"}}}
    job["data"]["test"] = {"_target_": "token_jobs.Tagged", "n": 3}
    token_jobs.run(job, world)


@pytest.mark.parametrize("ranks", [1, 2])
def test_prediction_and_test_data_of_ones_own(tmp_path: Path, ranks: int) -> None:
    run_ranks(run_tasks, ranks, str(tmp_path))
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert {"eval/loss", "eval/mine", "eval/hits", "test/loss", "test/hits"} <= metrics.keys()
    rows = [json.loads(line) for line in (tmp_path / "predictions-test.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert all(isinstance(n, int) for row in rows for n in row["logits"])  # what prediction_step returned
    labels = token_jobs.Tagged(11, 1).labels[:5]
    hits = (torch.tensor([row["logits"] for row in rows]) == labels).double().mean()
    assert metrics["test/hits"] == pytest.approx(float(hits))


@pytest.mark.parametrize(
    ("parts", "more", "said"),
    [
        ("Unused", {}, "has create_optimizer_and_scheduler, which is never called"),
        ("Tagged", {}, r"trainer\.parts: trainer_parts\.Tagged returned Tagged, not a dsjob\.Trainer"),
        ("Forgets", {"what": "backward"}, r"Forgets\.training_step computed no gradients"),
        ("Forgets", {"what": "outputs"}, "compute_loss returned Tensor with return_outputs=True"),
        ("Forgets", {"what": "optimizer"}, "create_optimizer returned NoneType, not a torch.optim.Optimizer"),
        ("Forgets", {"what": "metrics"}, r"Forgets\.evaluate returned NoneType, not numbers by name"),
        ("Forgets", {"what": "numbers"}, r"evaluate returned eval/text: str, not numbers by name"),
        ("Forgets", {"what": "prediction"}, "prediction_step returned Tensor"),
    ],
)
def test_what_people_forget(tmp_path: Path, parts: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match=said) as caught:
        token_jobs.run(make_document(str(tmp_path), parts, size=8, stage=0, **more))
    assert caught.value.hint or parts == "Tagged"


def test_attributes_of_hf_are_told_in_words_of_dsjob() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'accelerator': write self\.backward\(loss\)"):
        dsjob.Trainer().accelerator  # noqa: B018


def test_a_method_that_is_not_called_is_refused(tmp_path: Path) -> None:
    job = make_document(str(tmp_path), "OwnStep", size=8, stage=0)
    job["trainer"]["step"] = {"_target_": "token_jobs.sum_up"}
    with pytest.raises(ContractError, match=r"has training_step, but trainer\.step is set"):
        token_jobs.run(job)


def run_by_steps(world: World, folder: str) -> list[Any]:
    """The records and the weights of jobs that accumulate themselves, and that leave it to dsjob."""
    found = []
    for name, disabled in (("take_all", True), ("take_one", False)):
        step = {"step": {"_target_": f"trainer_parts.{name}"}, "disable_auto_grad_accumulation": disabled}
        job = token_jobs.make_document(f"{folder}/{name}", micro_batch=2, stage=3, trainer=step)
        job["data"] = {"train": {"_target_": "token_jobs.Tagged", "targets": 4}}
        found.append(token_jobs.run(job, world))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_may_aggregate_gradients_itself(tmp_path: Path, ranks: int) -> None:
    (own, weights), (usual, expected) = run_ranks(run_by_steps, ranks, str(tmp_path))[0]
    for key in ("step", "loss", "grad_norm"):
        assert [line[key] for line in own] == pytest.approx([line[key] for line in usual], abs=1e-7)
    assert [line["step"] for line in own] == [1, 2, 3]
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight)


def test_a_step_that_leaves_batches_is_refused(tmp_path: Path) -> None:
    step = {"step": {"_target_": "trainer_parts.take_first"}, "disable_auto_grad_accumulation": True}
    with pytest.raises(ContractError, match=r"trainer\.step was called 1 time, and the first model, .* took 0 steps"):
        token_jobs.run(token_jobs.make_document(str(tmp_path), micro_batch=2, trainer=step))


def test_a_class_can_be_passed_to_run(tmp_path: Path) -> None:
    document = token_jobs.make_document(str(tmp_path / "run"))
    document["callbacks"] = {}
    result = dsjob.run(document, trainer=trainer_parts.OwnRun, trust=["token_jobs"])
    assert result.metrics["eval/mine"] == 0.25
    assert json.loads((tmp_path / "run" / "resolved.json").read_text())["trainer"]["parts"] == {
        "_target_": "trainer_parts.OwnRun"
    }
    again = dsjob.run(str(tmp_path / "run"), overrides=["trainer.max_steps=4"], trust=["token_jobs", "trainer_parts"])
    assert (again.step, again.metrics["eval/mine"]) == (4, 0.25)


def test_a_class_that_ranks_cannot_import_is_refused(tmp_path: Path) -> None:
    class Local(dsjob.Trainer):
        pass

    with pytest.raises(dsjob.errors.UsageError, match="Local is defined inside a function"):
        dsjob.run(token_jobs.make_document(str(tmp_path)), trainer=Local)
    with pytest.raises(dsjob.errors.UsageError, match=r"trainer is a Tagged, not a class derived from dsjob\.Trainer"):
        dsjob.run(token_jobs.make_document(str(tmp_path)), trainer=token_jobs.Tagged())  # type: ignore[arg-type]


def test_parts_are_checked_like_every_target() -> None:
    (problem,) = find_problems(
        {**token_jobs.make_document("x"), "trainer": {"max_steps": 1, "train_batch": 8, "parts": "mine.Trainer"}}
    )
    assert (problem.dotted, problem.rule) == ("trainer.parts", "type")


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("model", "parts", "targets"),
    [("Net", "MultilabelTrainer", "labels"), ("Net", "Tags", "tags"), ("Kept", "Tags", "tags")],
)
def test_predictions_call_the_model_as_compute_loss_does(
    tmp_path: Path, model: str, parts: str, targets: str, there: bool, rounding: bool
) -> None:
    """The model does not take the targets, which the test set may lack. The default prediction_step knows it, too."""
    named = {key: {"_target_": "multilabel.samples", "targets": targets} for key in ("train", "eval")}
    test = {"_target_": "multilabel.samples", "n": 5, "targets": targets if there else None}
    parts = f"Rounding{parts.removesuffix('Trainer')}" if rounding else parts
    sections: dict[str, Any] = {
        "model": {"_target_": f"multilabel.{model}"},
        "data": {**named, "test": test},
        "trainer": {"max_steps": 1, "parts": {"_target_": f"multilabel.{parts}"}},
        "tasks": ["train", "predict"],
        "callbacks": {},
    }
    small_jobs.train(tmp_path, **sections)
    assert "eval/loss" in (tmp_path / "metrics.jsonl").read_text()
    lines = (tmp_path / "predictions-test.jsonl").read_text().splitlines()
    found = torch.tensor([json.loads(line)["logits"] for line in lines])
    layer = torch.nn.Linear(8, 4)
    weights = read_weights(str(tmp_path))
    layer.load_state_dict({name: weights[f"layer.{name}"] for name in ("weight", "bias")})
    expected = layer(torch.stack([each["x"] for each in multilabel.samples(5)])).detach()
    torch.testing.assert_close(found, expected.round() if rounding else expected)


def test_an_evaluation_needs_a_loss_whatever_the_batch_is(tmp_path: Path) -> None:
    """super().prediction_step of a batch without keys, whose targets nobody sees."""
    sections: dict[str, Any] = {
        "model": {"_target_": "multilabel.Positional"},
        "data": {"train": {"_target_": "multilabel.pairs"}, "eval": {"_target_": "multilabel.pairs"}},
        "outputs": [1],
        "trainer": {"max_steps": 1, "parts": {"_target_": "multilabel.Rounding"}},
        "callbacks": {},
    }
    small_jobs.train(tmp_path, **sections)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"]["eval/loss"] > 0


def test_the_config_of_an_engine_knows_that_of_the_model() -> None:
    engine = make_engine(0, net=multilabel.Net())
    assert (engine.config.num_labels, engine.config["train_batch_size"]) == (4, engine.rhythm.train_batch)
    with pytest.raises(AttributeError, match="neither the DeepSpeed config nor that of the model has 'labels'"):
        _ = engine.config.labels
    for copied in (copy.deepcopy(engine.config), pickle.loads(pickle.dumps(engine.config))):
        assert (type(copied), copied) == (dict, engine.config)
