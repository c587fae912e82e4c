"""Each part of a job can be built alone: without training data, without an optimizer, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from job_documents import resolve
from ranks import run_ranks
from small_jobs import TRUST, make_document

from dsjob.callbacks.callback import Callback
from dsjob.checkpoint.offline.convert import read_weights
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import Target
from dsjob.document.resolve import complete_job
from dsjob.errors import ContractError, DataError
from dsjob.ranks.mesh import World, join_world
from dsjob.training import build
from dsjob.training.checkpoints import build_checkpointer
from dsjob.training.loaders import build_collate, build_evaluation_sets, build_training_data
from dsjob.trust.grant import Trust

pytestmark = pytest.mark.usefixtures("hooks")

DATA = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 20}}
NOT_THERE = {"train": {"_target_": "small_jobs.Data", "n": "not a number"}}  # fails once it is called


def make(folder: Path | str, world_size: int = 1, **sections: Any) -> ResolvedJob:
    return complete_job(resolve(make_document(folder, **sections), world_size=world_size))


def evaluate(job: ResolvedJob, folder: Path | str, world: World) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """An evaluation of the newest checkpoint in `folder`; what it gave, and this rank's model."""
    engines = build.build_engines(build.build_models(job, TRUST), job, world, TRUST)
    assert engines.first.optimizer is None
    assert engines.first.lr_scheduler is None
    build_checkpointer(job, str(folder), world, Trust()).load(engines.first, optimizer=False, scheduler=False)
    sets = build_evaluation_sets(job.spec, world, build_collate(job.spec, TRUST), TRUST, "eval")
    evaluator = build.build_evaluator(job.spec, engines, sets, TRUST)
    return evaluator.evaluate(), dict(engines.first.module.state_dict())


def read_evaluations(folder: Path | str) -> list[float]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def test_models_alone_begin_as_in_training_and_need_no_data(tmp_path: Path) -> None:
    job = make(tmp_path, data=NOT_THERE)
    with pytest.raises(DataError, match="TypeError: randn"):
        build_training_data(job.spec, join_world(device="cpu"), None, TRUST)
    first = build.build_models(job, TRUST)["model"].state_dict()
    torch.rand(3)
    second = build.build_models(job, TRUST)["model"].state_dict()
    other = build.build_models(make(tmp_path, trainer={"seed": 5}), TRUST)["model"].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_models_that_are_not_trained_have_no_gradients(tmp_path: Path) -> None:
    models = {"a": {"model": {"_target_": "small_jobs.Net"}}, "b": {"model": {"_target_": "small_jobs.Net"}}}
    models["b"]["trainable"] = False  # type: ignore[assignment]
    step = {"step": {"_target_": "small_jobs.train"}}
    built = build.build_models(make(tmp_path, model=None, models=models, trainer=step), TRUST)
    assert list(built) == ["a", "b"]
    assert built["a"].fc.weight.requires_grad
    assert not built["b"].fc.weight.requires_grad


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (("model",), "model: small_jobs.Data returned Data"),
        (("models", "a", "model"), "models.a.model: small_jobs.Data"),
    ],
)
def test_what_is_no_model_is_told_with_its_place(where: tuple[str, ...], told: str) -> None:
    with pytest.raises(ContractError, match=told):
        build.build_model(Target("small_jobs.Data", {}), TRUST, where)


def test_an_evaluation_needs_neither_training_data_nor_an_optimizer(tmp_path: Path) -> None:
    small_jobs.train(tmp_path, data=DATA, checkpoint={"at_end": True})
    job = make(tmp_path, data={**DATA, **NOT_THERE}, optimizer={"type": "Adam", "params": {"lr": 0.1}})
    found, weights = evaluate(job, tmp_path, join_world(device="cpu"))
    assert found == {"eval/loss": pytest.approx(read_evaluations(tmp_path)[-1], rel=1e-6)}
    saved = read_weights(str(tmp_path))
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def evaluate_on_ranks(world: World, folder: str) -> float:
    job = make(folder, world.data_size, data={**DATA, **NOT_THERE}, zero_optimization={"stage": 3})
    return evaluate(job, folder, world)[0]["eval/loss"]


def test_an_evaluation_runs_on_other_ranks_and_at_another_stage(tmp_path: Path) -> None:
    small_jobs.train(tmp_path, data=DATA, checkpoint={"at_end": True})
    found = run_ranks(evaluate_on_ranks, 2, str(tmp_path))
    assert found == [pytest.approx(read_evaluations(tmp_path)[-1], rel=1e-5)] * 2


def test_there_are_no_sets_where_the_job_has_none(tmp_path: Path) -> None:
    world = join_world(device="cpu")
    assert build_evaluation_sets(make(tmp_path).spec, world, None, TRUST, "eval", "test") == {}
    sets = build_evaluation_sets(make(tmp_path, data=DATA).spec, world, None, TRUST, "eval", "test")
    assert {prefix: len(data) for prefix, data in sets.items()} == {"eval": 20}


def take_two(outputs: Any, batch: Any) -> float:
    """A metric."""
    return 2.0


def test_measures_alone_are_those_of_the_phase(tmp_path: Path) -> None:
    world = join_world(device="cpu")
    own = Trust(("small_jobs", "test_training_build"), (*TRUST.folders, str(Path(__file__).parent)))
    job = make(tmp_path, data=DATA, metrics={"two": {"_target_": "test_training_build.take_two"}})
    assert len(build.build_measures("train", job.spec, world, own)[0]) == 0
    measures, objects = build.build_measures("eval", job.spec, world, own)
    assert list(objects) == ["two"]
    engines = build.build_engines(build.build_models(job, own), job, world, own)
    sets = build_evaluation_sets(job.spec, world, None, own, "eval")
    found = build.build_evaluator(job.spec, engines, sets, own, measures=measures).evaluate()
    assert found["eval/two"] == 2.0


def test_callbacks_alone(tmp_path: Path) -> None:
    built = build.build_callbacks(make(tmp_path, data=NOT_THERE).spec, TRUST)
    assert list(built) == ["hooks"]
    assert isinstance(built["hooks"], Callback)
    wrong = make(tmp_path, callbacks={"mine": {"_target_": "small_jobs.Net"}})
    with pytest.raises(ContractError, match="Net, not a dsjob Callback"):
        build.build_callbacks(wrong.spec, TRUST)


def test_a_checkpointer_alone_touches_nothing(tmp_path: Path) -> None:
    world = join_world(device="cpu")
    checkpointer = build_checkpointer(make(tmp_path), str(tmp_path), world, Trust())
    assert checkpointer.url == f"{tmp_path}/checkpoints"
    assert checkpointer.tags() == []
    assert list(tmp_path.iterdir()) == []
    elsewhere = make(tmp_path, checkpoint={"dir": "memory://kept"})
    assert build_checkpointer(elsewhere, str(tmp_path), world, Trust()).url == "memory://kept"
