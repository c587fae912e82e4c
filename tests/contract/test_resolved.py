"""A resolved job as one value: nothing is lost on the way to a rank, and nothing is left to be resolved there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, resolve
from small_jobs import TRUST, make_document

from dsjob.contract.resolved import ResolvedJob
from dsjob.document import bare, normal
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import join_world
from dsjob.training.job import run_job

STEP = {"micro_batch": 4, "max_steps": 10, "step": {"_target_": "mine.step"}}
ONE = make_job(zero_optimization={"stage": 1}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 6}})
TWO = make_job(
    model=None,
    trainer=STEP,
    models={
        "a": {"model": {"_target_": "mine.A", "width": 3}},
        "b": {"model": {"_target_": "mine.B"}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD"}},
    },
)


@pytest.mark.parametrize("document", [ONE, TWO], ids=["one", "two"])
def test_a_rank_gets_what_the_launcher_has(document: dict[str, Any]) -> None:
    job = complete_job(resolve(document))
    assert ResolvedJob.from_text(job.to_text()) == job


@pytest.mark.parametrize("document", [ONE, TWO], ids=["one", "two"])
def test_the_stored_document_is_the_resolved_one(document: dict[str, Any]) -> None:
    resolved = resolve(document)
    assert json.dumps(complete_job(resolved).document) == json.dumps(resolved)


def test_each_model_is_complete() -> None:
    models = complete_job(resolve(TWO)).models
    assert list(models) == ["a", "b"]
    assert [model.spec.zero_optimization.stage for model in models.values()] == [0, 2]
    assert [model.config["zero_optimization"]["stage"] for model in models.values()] == [0, 2]
    assert [model.sections["optimizer"]["type"] for model in models.values()] == ["AdamW", "SGD"]
    assert models["b"].spec.optimizer is not None
    assert models["b"].spec.optimizer.params["momentum"] == 0
    assert models["b"].config["train_batch_size"] == 4
    assert models["b"].config["flops_profiler"]["enabled"] is False  # a section that only DeepSpeed's configs have


def test_a_document_of_an_earlier_version_is_completed() -> None:
    """It has old spellings, and lacks keys and sections that came later."""
    old = resolve(ONE)
    del old["torch_autocast"], old["trainer"]["loss_average"]
    old["zero_optimization"]["cpu_offload"] = True
    job = complete_job(old)
    assert job.spec.torch_autocast.enabled is False
    assert job.spec.trainer.loss_average == "targets"
    assert job.models["model"].spec.zero_optimization.offload == "optimizer"


def test_a_restarted_run_resumes() -> None:
    job = complete_job(resolve(make_job(checkpoint={"resume": "never"}))).resuming()
    assert job.document["checkpoint"]["resume"] == job.spec.checkpoint.resume == "auto"


def test_a_run_resolves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get all that they need. Only what an old checkpoint says of its job is completed."""
    given = complete_job(resolve(make_document(tmp_path)))
    handed = given.to_text()

    def refuse(*_: Any) -> None:
        raise AssertionError("a rank resolves")

    for module, name in ((normal, "resolve_auto"), (bare, "resolve_auto"), (normal.legacy, "expand")):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(AssertionError, match="a rank resolves"):
        complete_job(given.document)
    result = run_job(ResolvedJob.from_text(handed), str(tmp_path), join_world(device="cpu"), TRUST)
    assert result.step == given.spec.trainer.max_steps
