"""What a step's loss is the mean of: every target of the step counts once, whatever the micro batch and the ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import token_jobs
import torch
from ranks import run_ranks
from torch import Tensor

from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.errors import ContractError, DataError
from dsjob.ranks.mesh import World

CLOSE = {"rtol": 0.0, "atol": 1e-6}
LOSSES = {"the model's": None, "sum and count": {"_target_": "token_jobs.sum_up"}}


def run_job(world: World, folder: str, **given: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return token_jobs.run(token_jobs.make_document(tempfile.mkdtemp(dir=folder), **given), world)


def run_all(world: World, folder: str, loss: dict[str, Any] | None, whole: bool) -> dict[Any, Any]:
    sizes = [size for size in (8, 4, 2, 1) if size * world.data_size <= token_jobs.BATCH]
    given: dict[str, Any] = {"loss": loss} if loss else {}
    return {
        (stage, size): run_job(world, folder, stage=stage, micro_batch=size, **given)
        for stage in range(4)
        for size in (sizes if whole else sizes[stage % 2 :: 2])
    }


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "whole"])
@pytest.mark.full("some-2-sum and count")
def test_neither_micro_batch_nor_ranks_nor_stage_change_a_number(
    tmp_path: Any, whole: bool, world_size: int, loss: str
) -> None:
    losses, norms, evaluated, weights = token_jobs.train_by_hand(token_jobs.sum_up if LOSSES[loss] else None)
    for rank, results in enumerate(run_ranks(run_all, world_size, str(tmp_path), LOSSES[loss], whole)):
        for found, ends in results.values():
            for name, weight in weights.items():
                torch.testing.assert_close(ends[name], weight, **CLOSE)
            if rank == 0:
                *records, last = found
                assert [line["loss"] for line in records] == pytest.approx(losses, rel=0, abs=1e-6)
                assert [line["grad_norm"] for line in records] == pytest.approx(norms, rel=0, abs=1e-6)
                assert last["eval/loss"] == pytest.approx(evaluated, rel=0, abs=1e-6)


def run_pairs(world: World, folder: str, variants: list[dict[str, Any]]) -> list[list[dict[str, Tensor]]]:
    """The weights of each variant of a job, with micro batches of 4 and of 1."""
    return [[run_job(world, folder, micro_batch=size, **each)[1] for size in (4, 1)] for each in variants]


PRECISE: list[dict[str, Any]] = [
    {"gradient_predivide_factor": 2.0},
    {"gradient_allreduce_op": "sum", "stage": 1},
    {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": False}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
]
HALF: list[dict[str, Any]] = [
    {"bf16": {"enabled": True}, "stage": 0},
    {"fp16": {"enabled": True, "initial_scale_power": 8}, "stage": 3},
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "stage": 1},
]
SUMS = {"loss": LOSSES["sum and count"]}


@pytest.mark.parametrize("every", [3, 1])
@pytest.mark.full
def test_it_goes_with_every_other_way_to_reduce_gradients(every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        variants = [*PRECISE, *HALF, *({**each, **SUMS} for each in (*PRECISE, *HALF))][::every]
        for found in run_ranks(run_pairs, 2, folder, variants):
            for variant, (large, small) in zip(variants, found, strict=True):
                close = CLOSE if any(variant.items() >= each.items() for each in PRECISE) else {"rtol": 0, "atol": 2e-2}
                for name, weight in large.items():
                    torch.testing.assert_close(small[name], weight, **close, msg=lambda m, v=variant: f"{v}: {m}")


EVEN = {
    "train": {"_target_": "token_jobs.Tagged", "targets": 4},
    "eval": {"_target_": "token_jobs.Tagged", "n": 11, "targets": 4},
}


def run_even(world: World, folder: str) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    return [
        run_job(world, folder, stage=stage, micro_batch=2, data=EVEN, trainer={"loss_average": average})
        for stage in (0, 3)
        for average in ("targets", "batches")
    ]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full("2")
def test_where_all_have_equally_many_targets_no_bit_changes(tmp_path: Any, world_size: int) -> None:
    timed = ("samples_per_second", "tokens_per_second", "eta_seconds", "memory/peak_gib")
    for found in run_ranks(run_even, world_size, str(tmp_path)):
        for (ours, our_weights), (theirs, their_weights) in (found[:2], found[2:]):
            for mine, other in zip(ours, theirs, strict=True):
                assert {k: v for k, v in mine.items() if k not in timed} == {
                    k: v for k, v in other.items() if k not in timed
                }
            for name, weight in our_weights.items():
                torch.testing.assert_close(weight, their_weights[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Llama", "T5", "Lora"])
def test_models_of_transformers_say_which_labels_they_count(tmp_path: Any, kind: str) -> None:
    """Causal ones shift labels by one, so that the first of a sequence is no target; others do not."""
    pytest.importorskip("peft" if kind == "Lora" else "transformers")
    model = {"_target_": "token_jobs.build_of_transformers", "kind": kind}
    (one, one_weights), (other, other_weights) = (
        token_jobs.run(token_jobs.make_document(str(tmp_path / str(size)), model=model, micro_batch=size))
        for size in (8, 2)
    )
    for key in ("loss", "grad_norm", "eval/loss"):
        assert [line.get(key, 0.0) for line in other] == pytest.approx(
            [line.get(key, 0.0) for line in one], rel=0, abs=2e-6
        )
    for name, weight in one_weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=2e-6)


def test_the_mean_of_micro_batches_means_is_to_be_had(tmp_path: Any) -> None:
    document = token_jobs.make_document(str(tmp_path), micro_batch=4, trainer={"loss_average": "batches"})
    (first, *_), _ = token_jobs.run(document)
    assert abs(first["loss"] - token_jobs.train_by_hand()[0][0]) > 1e-3


def test_a_run_goes_on_in_the_midst_of_an_epoch_bit_for_bit(tmp_path: Any) -> None:
    def make(name: str, steps: int) -> dict[str, Any]:
        given = {"checkpoint": {"at_end": True}, "trainer": {"max_steps": steps}}
        return token_jobs.make_document(str(tmp_path / name), micro_batch=2, **given)

    _, whole = token_jobs.run(make("whole", 4))
    token_jobs.run(make("cut", 2))
    _, resumed = token_jobs.run(make("cut", 4))
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=0)


def test_a_step_without_any_target_is_an_error_of_the_data(tmp_path: Any) -> None:
    data = {"train": {"_target_": "token_jobs.Tagged", "targets": 0}}
    with pytest.raises(DataError, match="a step has no targets: all labels in its micro batches are -100"):
        token_jobs.run(token_jobs.make_document(str(tmp_path), data=data))


def run_unlike(world: World, folder: str) -> str:
    data = {"train": {"_target_": "token_jobs.make_unlike"}}
    try:
        run_job(world, folder, micro_batch=4, data=data)
    except ContractError as error:
        return error.message
    return ""


def test_labels_on_some_ranks_alone_are_told_and_wait_for_nobody(tmp_path: Any) -> None:
    told = "the first batch has no `labels` on data-parallel rank 1, but has them on others"
    assert run_ranks(run_unlike, 2, str(tmp_path)) == [told, told]


def test_a_run_of_a_version_that_averaged_micro_batches_is_told(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, **trainer: Any) -> str:
        given: dict[str, Any] = {"checkpoint": {"at_end": True}, "trainer": {"max_steps": steps, **trainer}}
        token_jobs.run(token_jobs.make_document(str(tmp_path), micro_batch=2, **given))
        return " ".join(capfd.readouterr().out.split())

    class Older(Checkpointer):
        def __init__(self, *given: Any, job: Any, **options: Any) -> None:
            trainer = {key: value for key, value in job["trainer"].items() if key != "loss_average"}
            super().__init__(*given, job={**job, "trainer": trainer}, **options)

    told = "averaged the means of micro batches, as trainer.loss_average=batches does"
    with monkeypatch.context() as older:
        older.setattr("dsjob.training.checkpoints.Checkpointer", Older)
        run(1)
        assert told not in run(2, loss_average="batches")
    assert told in run(3)
    assert told not in run(4)
