"""Jobs under trainer.mpu: the numbers of a job on one rank, whichever ranks read the data and tell the losses."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel
from job_documents import find_problems, make_job, resolve
from ranks import run_ranks

from dsjob import ModelParallelUnit, storage
from dsjob.document.resolve import complete_job
from dsjob.errors import ContractError, DataError, UsageError
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import divide
from dsjob.training import job
from dsjob.trust.grant import Trust

TRUST = Trust(folders=(str(Path(tensor_parallel.__file__).parent),))
GIVEN = {
    "step": {"_target_": "tensor_parallel.train_on_given"},
    "eval_step": {"_target_": "tensor_parallel.evaluate_given"},
}
METHODS = {"mpu": {"_target_": "tensor_parallel.make_mpu"}}
UNITS: dict[str, dict[str, Any]] = {
    "methods": METHODS,
    "fields": {"mpu": {"_target_": "tensor_parallel.make_fields"}, **GIVEN},
    "other spelling": {
        "mpu": {"_target_": "tensor_parallel.make_fields", "spelling": "should_build_data_loader", "form": "plain"},
        **GIVEN,
    },
    "dict": {"mpu": {"_target_": "tensor_parallel.make_fields", "form": "dict"}, **GIVEN},
}


def make_document(folder: str, trainer: dict[str, Any], **sections: Any) -> dict[str, Any]:
    size = {"model_parallel_size": 2} if "mpu" in trainer else {}
    steps = {"train_batch": 8, "micro_batch": 2, "max_steps": 4, "log_every": 1, "eval_every": 2, **size, **trainer}
    document: dict[str, Any] = {
        "model": {"_target_": "tensor_parallel.build_own_part" if size else "tensor_parallel.build_whole"},
        "data": {
            "train": {"_target_": "tensor_parallel.Rows"},
            "eval": {"_target_": "tensor_parallel.Rows", "length": 11, "seed": 1},
        },
        "trainer": steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "metrics": {
            "again": {"_target_": "tensor_parallel.tell_loss"},
            "batches": {"_target_": "tensor_parallel.tell_loss", "reduce": {"_target_": "tensor_parallel.count_all"}},
        },
        "checkpoint": {"every": 2},
        "output": {"dir": folder},
    }
    return make_job(**{**document, **sections})


def run(document: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Runs a job on this rank; its log records and evaluations."""
    resolved = resolve(document, world_size=world.data_size)
    folder = resolved["output"]["dir"]
    storage.make_folder(folder)
    job.run_job(complete_job(resolved), folder, world, TRUST)
    if world.data_rank:
        return []
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def run_unit(world: World, folder: str, name: str) -> dict[Any, Any]:
    """The records of a job with one of the units, and how many datasets this rank has built."""
    tensor_parallel.Rows.built = 0
    records = run(make_document(f"{folder}/{name}", UNITS[name], zero_optimization={"stage": 2}), world)
    return {name: records, (name, "built"): tensor_parallel.Rows.built}


def run_all(world: World, folder: str) -> dict[Any, Any]:
    found = {**run_unit(world, folder, "methods"), **run_unit(world, folder, "fields")}
    for part in ("train", "eval"):
        document = make_document(f"{folder}/uneven-{part}", METHODS)
        document["data"][part] = {"_target_": "tensor_parallel.Uneven", "length": 8}
        with pytest.raises(DataError) as unequal:
            run(document, world)
        found["lengths", part] = unequal.value.message
    more = make_document(f"{folder}/fields", {**UNITS["fields"], "max_steps": 6}, zero_optimization={"stage": 2})
    found["resumed"] = run(more, world)
    for name, trainer, sections in (
        ("size", {**METHODS, "model_parallel_size": 4, "train_batch": 2}, {}),
        ("no step", {"mpu": UNITS["fields"]["mpu"]}, {}),
        ("no eval step", {key: UNITS["fields"][key] for key in ("mpu", "step")}, {}),
    ):
        with pytest.raises(ContractError) as caught:
            run(make_document(f"{folder}/{name}", trainer, **sections), world)
        found[name] = f"{caught.value.message}. {caught.value.hint}"
    for name, fields in {
        "nobody": {"should_report_metrics": False},
        "unread": {"should_build_dataloader": world.data_rank < 2},
        "uneven": {"data_parallel_rank": int(world.data_rank == 0)},
    }.items():
        given = {"data_parallel_rank": world.data_rank // 2, "data_parallel_world_size": 2, **fields}
        with pytest.raises(UsageError) as caught_too:
            divide(world, given)
        found[name] = caught_too.value.message
    whole = {"data_parallel_rank": world.data_rank // 2, "data_parallel_world_size": 2}
    with pytest.raises(UsageError) as one:
        divide(world, whole if world.data_rank != 1 else {**whole, "data_rank": 0})
    found["one"] = one.value.message
    divided = divide(world, whole)
    groups: list[Any] = [divided.data_group, divided.model.group]
    found["timeouts"] = [group._get_backend(world.device).options._timeout.total_seconds() for group in groups]
    return found


def run_other_data(world: World, folder: str) -> dict[Any, Any]:
    """The records of a job that reads a stream, and of one that reads ids of tokens."""
    document = make_document(f"{folder}/stream", UNITS["fields"])
    document["data"]["train"] = {"_target_": "tensor_parallel.Stream"}
    found = {"stream": run(document, world)}
    document = make_document(f"{folder}/ids", {**GIVEN, "mpu": {**UNITS["fields"]["mpu"], "reads": 1}})
    document["data"]["train"] = {"_target_": "tensor_parallel.Ids"}
    found["ids"] = run(document, world)
    return found


@cache
def results_of_other_data() -> dict[Any, Any]:
    """Of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[Any, Any] = run_ranks(run_other_data, 4, folder)[0]
        return found


@cache
def results() -> list[dict[Any, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_all, 4, folder)


@cache
def results_of(name: str) -> list[dict[Any, Any]]:
    """Of one unit."""
    if name in ("methods", "fields"):
        return results()
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_unit, 4, folder, name)


@cache
def alone() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_alone, 1, folder)[0]


def run_alone(world: World, folder: str) -> list[dict[str, Any]]:
    return run(make_document(folder, {"max_steps": 6}), world)


def pick(records: list[dict[str, Any]], name: str, steps: int) -> list[float]:
    return [record[name] for record in records if name in record and record["step"] <= steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.full("other spelling", "dict")
def test_a_job_gives_what_it_gives_on_one_rank(name: str) -> None:
    found = results_of(name)[0][name]
    for key in ("loss", "grad_norm", "eval/loss", "eval/again", "eval/batches", "epoch"):
        assert pick(found, key, 4) == pytest.approx(pick(alone(), key, 4), rel=1e-5), key
    if name != "methods":
        assert pick(found, "double", 4) == pytest.approx([2 * loss for loss in pick(found, "loss", 4)])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.full("other spelling", "dict")
def test_data_is_built_on_the_ranks_that_read_it(name: str) -> None:
    built = [result[name, "built"] for result in results_of(name)]
    assert built == ([2, 2, 2, 2] if name == "methods" else [2, 0, 2, 0])


@pytest.mark.slow
def test_a_resumed_job_goes_on_alike() -> None:
    assert pick(results()[0]["resumed"], "loss", 6) == pytest.approx(pick(alone(), "loss", 6), rel=1e-5)


@pytest.mark.slow
@pytest.mark.full
def test_a_job_may_read_a_stream() -> None:
    assert len(pick(results_of_other_data()["stream"], "loss", 4)) == 4


@pytest.mark.slow
@pytest.mark.full
def test_tokens_are_counted_by_the_ranks_that_read_them() -> None:
    found = results_of_other_data()["ids"]
    assert pick(found, "tokens_per_second", 4) == pytest.approx([4 * n for n in pick(found, "samples_per_second", 4)])


@pytest.mark.slow
def test_groups_that_are_made_for_a_unit_have_the_jobs_timeout() -> None:
    for result in results():
        assert result["timeouts"] == [120.0, 120.0]


@pytest.mark.slow
def test_what_does_not_go_together_is_refused_on_every_rank() -> None:
    for told in results():
        assert told["size"].endswith("trainer.model_parallel_size=2")
        assert "so trainer.step is required and is not set" in told["no step"]
        assert "so trainer.eval_step is required" in told["no eval step"]
        assert told["nobody"] == "no rank's mpu reports metrics"
        assert "no rank builds the loader of data-parallel rank 1" in told["unread"]
        assert told["lengths", "train"] == "data.train differs between ranks: 8 samples on rank 0, 16 samples on rank 1"
        assert told["lengths", "eval"] == "ranks that hold one model have 2 and 4 batches of data.eval"
        assert told["one"].startswith("rank 1: ") == (told is not results()[1])
        assert "other keys" in told["one"]
        assert told["uneven"] == "the ranks' mpus have data-parallel ranks 1, 0, 0, 0 of 2"


def test_batches_are_those_of_the_data_parallel_ranks() -> None:
    trainer = {"mpu": {"_target_": "tensor_parallel.make_mpu"}, "model_parallel_size": 2, "micro_batch": 2}
    document = make_job(trainer={**trainer, "max_steps": 1, "train_batch": 8})
    resolved = resolve(document, world_size=4)
    assert resolved["trainer"]["grad_accum"] == 2
    assert resolved["resolved"]["world_size"] == 4
    assert resolve(resolved, world_size=8)["trainer"]["grad_accum"] == 1
    assert resolve(resolved, world_size=4)["trainer"]["grad_accum"] == 2
    (problem,) = find_problems(document, world_size=3)
    assert problem.dotted == "trainer.model_parallel_size"
    assert problem.hint == "start 2 ranks, or another multiple of 2"
    wrong = make_job(trainer={**trainer, "max_steps": 1, "train_batch": 8, "grad_accum": 1})
    (problem,) = find_problems(wrong, world_size=4)
    assert "world size 2 (4 ranks / trainer.model_parallel_size 2)" in problem.message
    assert "launch.nproc=8" in problem.hint
    (problem,) = find_problems(
        make_job(trainer={"model_parallel_size": 2, "micro_batch": 2, "max_steps": 1}), world_size=4
    )
    assert problem.rule == "no-mpu"


def test_both_spellings_are_one_field() -> None:
    unit = ModelParallelUnit(0, 1, True, should_build_data_loader=False)
    assert (unit.should_build_dataloader, unit.should_build_data_loader) == (False, False)
    assert ModelParallelUnit(0, 1, True, True).should_build_data_loader
    with pytest.raises(UsageError, match="different values"):
        ModelParallelUnit(0, 1, should_build_dataloader=True, should_build_data_loader=False)
    alone = World(data_rank=0, local_rank=0, data_size=1, device=tensor_parallel.torch.device("cpu"))
    with pytest.raises(UsageError, match="other keys"):
        divide(alone, {"data_parallel_rank": 0, "data_rank": 1})
    with pytest.raises(UsageError, match="has no get_data_parallel_rank"):
        divide(alone, object())
    assert divide(alone, ModelParallelUnit(0, 1)) == alone
