"""The section `models`: what each model is alone, and what is wrong with several."""

from __future__ import annotations

from typing import Any

import pytest
from job_documents import find_problems, make_job, nowhere, resolve, resolve_composed

from dsjob.contract.models import take_model
from dsjob.contract.spec import JobSpec
from dsjob.document.compose import compose
from dsjob.document.resolve import complete_job, resolve_job


def resolve_model(document: dict[str, Any], name: str) -> JobSpec:
    return complete_job(document).models[name].spec


STEP = {"micro_batch": 4, "max_steps": 10, "step": {"_target_": "mine.step"}}


def make_two(trainer: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    models = {"a": {"model": {"_target_": "mine.A"}}, "b": {"model": {"_target_": "mine.B"}, **own}}
    return make_job(model=None, models=models, trainer=trainer or STEP)


def test_a_model_has_the_jobs_settings_and_its_own_over_them() -> None:
    document = make_two(zero_optimization={"stage": 2}, optimizer={"type": "SGD"}, gradient_clipping=0)
    document |= {"zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True}}
    resolved = resolve(document)
    a, b = resolve_model(resolved, "a"), resolve_model(resolved, "b")
    assert (a.zero_optimization.stage, b.zero_optimization.stage) == (1, 2)
    assert b.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert (a.gradient_clipping, b.gradient_clipping) == (1.0, 0)
    assert a.optimizer is not None
    assert b.optimizer is not None
    assert (a.optimizer.type, a.optimizer.params["lr"]) == ("AdamW", 0.001)
    assert (b.optimizer.type, b.optimizer.params["momentum"]) == ("SGD", 0)
    assert a.model is not None
    assert a.model.path == "mine.A"


def test_resolving_leaves_what_a_model_does_not_say_to_the_job() -> None:
    assert resolve(make_two(bf16={"enabled": True}))["models"]["b"] == {
        "model": {"_target_": "mine.B"},
        "bf16": {"enabled": True},
    }


def test_a_model_that_is_not_trained_has_no_optimizer() -> None:
    alone = take_model(make_two(trainable=False), "b")
    assert "optimizer" not in alone
    assert "scheduler" not in alone


@pytest.mark.parametrize(
    ("document", "path", "said"),
    [
        (make_two() | {"model": {"_target_": "mine.C"}}, "models", "cannot be combined with model"),
        (make_two({"micro_batch": 4, "max_steps": 10}), "models", "need trainer.step"),
        (make_two() | {"loss": {"_target_": "mine.loss"}}, "loss", "not used"),
        (make_two(zero_optimization={"stagee": 1}), "models.b.zero_optimization.stagee", "unknown key"),
        (
            make_two(fp16={"enabled": True}) | {"bf16": {"enabled": True}},
            "models.b",
            "bf16.enabled is true, and so is fp16.enabled",
        ),
        (make_two() | {"models": {"a.b": {"model": {"_target_": "mine.A"}}}}, "models", "a.b"),
        (
            make_two() | {"models": {"a": {"model": {"_target_": "mine.A"}, "trainable": False}}},
            "models.a.trainable",
            "first",
        ),
        (make_two(model={"width": 3}), "models.b.model", "_target_"),
        (make_job(model=None), "", "the job has no model section, which is required"),
    ],
)
def test_what_is_wrong_is_told_where_it_is(document: dict[str, Any], path: str, said: str) -> None:
    problems = find_problems(document)
    assert any(p.dotted == path and said in str(p) for p in problems), [str(p) for p in problems]


def test_a_trained_model_needs_an_optimizer_from_somewhere() -> None:
    document = make_two(optimizer={"type": "SGD"})
    del document["optimizer"]
    assert [p.dotted for p in find_problems(document)] == ["models.a.optimizer"]
    document["models"]["a"]["optimizer"] = document["models"]["b"].pop("optimizer")
    document["models"]["b"]["trainable"] = False
    assert resolve(document)["models"]["a"]["optimizer"]["type"] == "SGD"


def test_the_command_line_reaches_into_a_model() -> None:
    composed = compose(["+recipe=gan_digits", "models.generator.zero_optimization.stage=1"])
    resolved = resolve_composed(composed)
    assert resolve_model(resolved, "generator").zero_optimization.stage == 1
    assert resolve_model(resolved, "discriminator").zero_optimization.stage == 0


def test_sections_are_merged_down_to_their_keys() -> None:
    offload = {"offload_optimizer": {"pin_memory": True}}
    document = make_two(zero_optimization=offload) | {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    }
    zero = resolve_model(resolve(document), "b").zero_optimization
    assert zero.offload_optimizer is not None
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", True)


def test_auto_is_resolved_in_each_model() -> None:
    done = resolve_job(make_two(optimizer={"type": "AdamW", "params": {"lr": "auto"}}), world_size=1, locate=nowhere)
    assert done.document["models"]["b"]["optimizer"]["params"]["lr"] == 5e-5
    assert "auto" in done.derived["models", "b", "optimizer", "params", "lr"]


def test_a_problem_of_the_job_does_not_hide_that_of_a_model() -> None:
    warm = {"type": "WarmupLR", "params": {"warmup_num_steps": 200}}
    document = make_two(scheduler=warm) | {"scheduler": {**warm, "params": {"warmup_num_steps": 100}}}
    told = {p.dotted for p in resolve_job(document, world_size=1, locate=nowhere).warnings}
    assert told >= {"scheduler.params.warmup_num_steps", "models.b.scheduler.params.warmup_num_steps"}
