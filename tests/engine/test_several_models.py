"""Jobs that train several models: each spread in its own way, saved and resumed together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pairs
import pytest
from job_documents import make_job, resolve
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from dsjob import Callback, RunView, storage
from dsjob.checkpoint.offline.convert import convert
from dsjob.document.resolve import complete_job
from dsjob.errors import ContractError, UsageError
from dsjob.ranks.mesh import World, join_world
from dsjob.training import job
from dsjob.trust.grant import Trust

TRUST = Trust(prefixes=("test_several_models",), folders=(str(Path(pairs.__file__).parent), str(Path(__file__).parent)))


def make_document(folder: str, **sections: Any) -> dict[str, Any]:
    models = {
        "student": {"model": {"_target_": "pairs.Line"}},
        "teacher": {
            "model": {"_target_": "pairs.Line", "width": 32},
            "optimizer": {"type": "Adam", "params": {"lr": 0.03}},
        },
    }
    trainer = {"train_batch": 24, "micro_batch": 4, "max_steps": 12, "log_every": 1, "step": {"_target_": "pairs.step"}}
    document: dict[str, Any] = {
        "model": None,
        "models": models,
        "data": {"train": {"_target_": "pairs.Points"}},
        "trainer": {**trainer, **sections.pop("trainer", {})},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "output": {"dir": folder},
    }
    return make_job(**{**document, **sections})


def run(document: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Runs a job on this rank; its log records, of rank 0."""
    resolved = resolve(document, world_size=world.data_size)
    folder = resolved["output"]["dir"]
    storage.make_folder(folder)
    job.run_job(complete_job(resolved), folder, world, TRUST)
    metrics = Path(folder, "metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()] if world.data_rank == 0 else []


def run_stages(world: World, folder: str) -> list[list[dict[str, Any]]]:
    return [run(make_document(f"{folder}/{n}", zero_optimization={"stage": n}), world) for n in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.full("1", "3")
def test_every_stage_gives_the_same_losses(tmp_path: Path, world_size: int) -> None:
    first, *others = run_ranks(run_stages, world_size, str(tmp_path))[0]
    for losses in others:
        for name in ("loss", "teacher"):
            assert [r[name] for r in losses] == pytest.approx([r[name] for r in first], rel=1e-5)
    assert first[-1]["teacher"] < first[0]["teacher"] / 2


class Look(Callback):
    """Keeps what the engines are at the end."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    def on_end(self, run: RunView) -> None:
        for name, engine in run.engines.items():  # type: ignore[attr-defined]
            weights = list(engine.strategy.weights().values())
            sharded = all(isinstance(weight, DTensor) for weight in weights)
            kind = type(engine.optimizer).__name__ if engine.optimizer else None
            Look.seen[name] = (engine.precision.name, sharded, kind, engine.module.training, engine.global_steps)


def run_mixed(world: World, folder: str) -> dict[str, Any]:
    models = {
        "student": {
            "model": {"_target_": "pairs.Line"},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
        },
        "teacher": {"model": {"_target_": "pairs.Line", "width": 32}, "trainable": False},
    }
    callbacks = {"look": {"_target_": "test_several_models.Look"}}
    run(make_document(folder, models=models, callbacks=callbacks), world)
    import test_several_models

    return test_several_models.Look.seen


def test_each_model_has_its_own_precision_stage_and_optimizer(tmp_path: Path) -> None:
    for seen in run_ranks(run_mixed, 2, str(tmp_path)):
        assert seen == {"student": ("bf16", True, "SGD", True, 12), "teacher": ("fp32", False, None, False, 0)}


def run_interrupted(world: World, folder: str) -> list[list[dict[str, Any]]]:
    models = {
        name: {**entry, "model": {**entry["model"], "dropout": 0.2}}
        for name, entry in make_document("")["models"].items()
    }
    sections = {"models": models, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}}
    whole = run(make_document(f"{folder}/whole", **sections), world)
    run(make_document(f"{folder}/parts", **sections, trainer={"max_steps": 5}), world)
    return [whole, run(make_document(f"{folder}/parts", **sections), world)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit_and_converts(tmp_path: Path, world_size: int) -> None:
    whole, parts = run_ranks(run_interrupted, world_size, str(tmp_path))[0]
    names = ("step", "loss", "teacher", "lr", "grad_norm")
    assert [[r[n] for n in names] for r in parts] == [[r[n] for n in names] for r in whole]
    weights = []
    for name in ("whole", "parts"):
        convert(str(tmp_path / name / "checkpoints"), str(tmp_path / name / "out"), to="fp32")
        weights.append(load_file(str(tmp_path / name / "out" / "model.safetensors")))
    first, second = weights
    assert sorted(first) == sorted(f"{m}.{n}" for m in ("student", "teacher") for n in pairs.Line().state_dict())
    assert all(first[name].equal(second[name]) for name in first)
    assert first["teacher.layers.0.weight"].shape == (32, 2)
    convert(str(tmp_path / "whole" / "checkpoints"), str(tmp_path / "one"), to="fp32", model="student")
    pairs.Line().load_state_dict(load_file(str(tmp_path / "one" / "model.safetensors")))
    with pytest.raises(UsageError, match="no model 'pupil'"):
        convert(str(tmp_path / "whole" / "checkpoints"), str(tmp_path / "two"), to="fp32", model="pupil")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("pairs.forgetful", "was called 6 times, and the first model, student, took 0 steps, not 1"),
        ("pairs.twice", "the first model, student, took 2 steps, not 1"),
        ("pairs.uneven", "teacher is in the middle of accumulating"),
        ("pairs.named_as_lr", "'lr', a reserved log name"),
        ("pairs.now_and_then", "returned loss, extra, teacher, but|but loss, extra, teacher in an earlier call"),
        ("pairs.wordy", "trainer.step returned loss: str"),
    ],
)
def test_a_step_that_does_not_do_its_part_is_told(tmp_path: Path, step: str, said: str) -> None:
    document = make_document(str(tmp_path / "run"), trainer={"step": {"_target_": step}})
    with pytest.raises(ContractError, match=said):
        run(document, join_world(device="cpu"))


def run_with_ranks(world: World, folder: str) -> Any:
    said = ""
    try:
        run(make_document(f"{folder}/a", trainer={"step": {"_target_": "pairs.named_by_rank"}}), world)
    except ContractError as error:
        said = error.message
    sections = {"data": {"train": {"_target_": "pairs.Points"}, "eval": {"_target_": "pairs.Points", "count": 13}}}
    trainer = {"step": {"_target_": "pairs.in_another_order"}, "eval_step": {"_target_": "pairs.evaluate"}}
    records = run(make_document(f"{folder}/b", trainer=trainer, **sections), world)
    return said, records


def test_ranks_return_the_same_names_in_any_order_and_evaluate_uneven_batches(tmp_path: Path) -> None:
    (said, records), (other, _) = run_ranks(run_with_ranks, 2, str(tmp_path))
    assert said == other == "trainer.step returned loss, of_0, teacher on rank 0, but loss, of_1, teacher on rank 1"
    assert (records[-2]["a"], records[-2]["b"]) == (1.0, 3.0)
    assert records[-1]["eval/mean"] == pytest.approx(float(pairs.Points(13).x.mean()))


def test_what_the_others_do_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = make_document(str(tmp_path / "a"))
    document["models"]["teacher"]["fp16"] = {"enabled": True, "loss_scale": 1e30}
    records = run(document, join_world(device="cpu"))
    assert (records[0]["teacher/lr"], records[0]["teacher/loss_scale"]) == (0.03, 1e30)
    assert "1 step of teacher, the last one 12: gradients overflowed fp16" in capsys.readouterr().out
    run(
        make_document(str(tmp_path / "b"), trainer={"step": {"_target_": "pairs.student_alone"}}),
        join_world(device="cpu"),
    )
    assert "teacher has an optimizer but has not taken a step yet" in capsys.readouterr().out


def test_a_plateau_needs_a_loss_to_follow(tmp_path: Path) -> None:
    document = make_document(
        str(tmp_path / "a"),
        data={"train": {"_target_": "pairs.Points"}, "eval": {"_target_": "pairs.Points"}},
        scheduler={"type": "ReduceLROnPlateau", "params": {}},
        trainer={"eval_step": {"_target_": "pairs.without_loss"}, "eval_every": 4},
    )
    with pytest.raises(ContractError, match="no `loss`, which ReduceLROnPlateau requires"):
        run(document, join_world(device="cpu"))


def test_a_step_of_ones_own_may_train_one_model(tmp_path: Path) -> None:
    document = make_document(
        str(tmp_path / "run"),
        models=None,
        model={"_target_": "pairs.Line"},
        trainer={"step": {"_target_": "pairs.alone"}},
    )
    records = run(document, join_world(device="cpu"))
    assert records[-1]["loss"] < records[0]["loss"]
