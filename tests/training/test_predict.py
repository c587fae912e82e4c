"""Predictions: one entry per sample, in the order of the data, whatever the ranks, the stage and the micro batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metric_jobs
import pytest
import torch
from job_documents import find_problems, resolve
from metric_jobs import Rare, make_document
from ranks import run_ranks
from safetensors.torch import load as load_safetensors
from torch import Tensor
from torch.utils.data import DataLoader

from dsjob import storage
from dsjob.document.resolve import complete_job
from dsjob.errors import ContractError, DataError, DsjobError
from dsjob.ranks.mesh import World, join_world
from dsjob.training.job import run_job
from dsjob.trust.grant import Trust

RARE = {"_target_": "metric_jobs.Rare"}
TRUST = Trust(folders=(*metric_jobs.TRUST.folders, str(Path(__file__).parent)))


def load(batch_size: int, n: int = 10, distributed: bool = False) -> Any:
    """A loader of the user."""
    if not distributed:
        return DataLoader(Rare(n), batch_size=batch_size)
    sampler: Any = torch.utils.data.DistributedSampler(Rare(n), shuffle=False)
    return DataLoader(Rare(n), batch_size=batch_size, sampler=sampler)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Rare(7)[index] for index in range(7)])


class Odd(metric_jobs.Judged):
    """Returns outputs of several kinds."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        scores = torch.stack([x, labels.float()], 1)
        strange = torch.where(labels == 1, torch.inf, x)
        lengths = torch.ones(len(x), len(x))  # as long as the batch
        return {**found, "scores": scores, "strange": strange, "lengths": lengths, "total": x.sum(), "complex": x + 1j}


def make(folder: str, **sections: Any) -> dict[str, Any]:
    """A job that only predicts."""
    trainer = {"micro_batch": 4, "eval_every": 0, **sections.pop("trainer", {})}
    given = {"data": {"train": RARE, "test": {**RARE, "n": 37}}, "metrics": {}, **sections}
    return make_document(folder, **{"tasks": ["predict"], "trainer": trainer, **given})


def predict(world: World, folder: str, sections: dict[str, Any]) -> None:
    resolved = resolve(make(folder, **sections), world_size=world.data_size)
    storage.make_folder(folder)
    run_job(complete_job(resolved), folder, world, TRUST)


def read_lines(file: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in storage.read_text(str(file)).splitlines()]


@pytest.mark.parametrize("target", ["metric_jobs.Rare", "test_predict.load"])
def test_a_limit_leaves_the_first_samples(tmp_path: Path, target: str) -> None:
    data = {"_target_": target, "n": 37} | ({"batch_size": 4} if target.endswith("load") else {})
    sections = {
        "data": {"train": RARE, "test": data},
        "predict": {"outputs": {"score": "outputs.logits"}, "batches": 3},
    }
    run_ranks(predict, 2, str(tmp_path), sections)
    expected = [{"index": index, "score": Rare(37).x[index].item()} for index in range(3 * 4 * 2)]
    assert read_lines(tmp_path / "predictions-test.jsonl") == expected


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3), (3, 0), (3, 3)])
@pytest.mark.full("2-3", "3-0")
def test_each_sample_is_there_once_and_in_order(tmp_path: Path, world_size: int, stage: int) -> None:
    """In the sets of 1 and 2 samples, some ranks have no batch. One file is the same, byte for byte."""
    sets = {"many": {**RARE, "n": 37}, "two": {**RARE, "n": 2}, "one": {**RARE, "n": 1}}
    sections = {
        "data": {"train": RARE, "test": sets},
        "predict": {"outputs": {"score": "outputs.logits", "label": "batch.labels"}},
        "zero_optimization": {"stage": stage},
    }
    run_ranks(predict, world_size, str(tmp_path), sections)
    for name, n in (("many", 37), ("two", 2), ("one", 1)):
        data = Rare(n)
        assert read_lines(tmp_path / f"predictions-test-{name}.jsonl") == [
            {"index": index, "score": data.x[index].item(), "label": data.labels[index].item()} for index in range(n)
        ]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["predictions"] == [f"{tmp_path}/predictions-test-{name}.jsonl" for name in sets]
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_are_written_as_safetensors(tmp_path: Path, world_size: int) -> None:
    sections = {
        "model": {"_target_": "test_predict.Odd"},
        "predict": {
            "outputs": {"scores": "outputs.scores", "best": "outputs.scores.argmax", "x": "outputs.strange"},
            "format": "safetensors",
        },
    }
    run_ranks(predict, world_size, str(tmp_path), sections)
    found, data = load_safetensors((tmp_path / "predictions-test.safetensors").read_bytes()), Rare(37)
    scores = torch.stack([data.x, data.labels.float()], 1)
    assert found.keys() == {"scores", "best", "x"}
    assert torch.equal(found["scores"], scores)
    assert torch.equal(found["best"], scores.argmax(1))
    assert torch.equal(found["x"], torch.where(data.labels == 1, torch.inf, data.x))


@pytest.mark.parametrize("test_set", [{"_target_": "test_predict.load", "batch_size": 3}, "loader", "stream"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full("2-loader")
def test_loaders_and_streams_keep_their_order(tmp_path: Path, world_size: int, test_set: Any) -> None:
    data: dict[str, Any] = {"train": RARE, "test": test_set}
    if test_set == "loader":
        loader = {"_target_": "torch.utils.data.DataLoader", "drop_last": False}
        data = {"train": RARE, "test": {**RARE, "n": 10}, "loader": loader}
    elif test_set == "stream":
        data["test"] = {"_target_": "test_predict.Stream"}
    run_ranks(predict, world_size, str(tmp_path), {"data": data})
    n = 7 if test_set == "stream" else 10
    lines = read_lines(tmp_path / "predictions-test.jsonl")
    assert [line["index"] for line in lines] == list(range(n))
    assert [line["logits"] for line in lines] == Rare(n).x.tolist()


def predict_here(folder: Path | str, **sections: Any) -> None:
    predict(join_world(device="cpu"), str(folder), sections)


def test_values_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    predict_here(tmp_path, model={"_target_": "test_predict.Odd"}, predict={"outputs": {"x": "outputs.strange"}})
    found, data = read_lines(tmp_path / "predictions-test.jsonl"), Rare(37)
    assert [line["x"] is None for line in found] == data.labels.bool().tolist()


def test_predictions_go_to_a_url(tmp_path: Path) -> None:
    predict_here(tmp_path, predict={"dir": "memory://predicted"})
    assert len(read_lines("memory://predicted/predictions-test.jsonl")) == 37
    predict_here(tmp_path, predict={"dir": f"file://{tmp_path}/there"})
    assert len(read_lines(tmp_path / "there" / "predictions-test.jsonl")) == 37
    nproc = {"launch": {"nproc": 2}, "predict": {"dir": "memory://predicted"}}
    assert [p.dotted for p in find_problems(make("x", **nproc), world_size=2)] == ["predict.dir"]


def test_data_eval_is_predicted_where_there_is_no_test_set_and_other_parts_are_replaced(tmp_path: Path) -> None:
    left = tmp_path / "predictions-eval.jsonl.parts" / "r00001-lines"
    left.parent.mkdir()
    left.write_text("of a run that was killed")
    predict_here(tmp_path, data={"train": RARE, "eval": {**RARE, "n": 5}}, tasks=["train", "predict"])
    assert [line["index"] for line in read_lines(tmp_path / "predictions-eval.jsonl")] == list(range(5))
    assert not left.parent.exists()


def fail(world: World, folder: str, sections: dict[str, Any]) -> str:
    try:
        predict(world, folder, sections)
    except DsjobError as error:
        return error.message
    return ""


def test_samples_whose_order_is_not_known_are_refused(tmp_path: Path) -> None:
    divided = {"_target_": "test_predict.load", "batch_size": 3, "distributed": True}
    found = run_ranks(fail, 2, str(tmp_path), {"data": {"train": RARE, "test": divided}})
    assert (
        found
        == ["data.test is a loader that divides its samples among the ranks itself, so their order is not known"] * 2
    )
    with pytest.raises(DataError):
        predict_here(tmp_path, data={"train": RARE, "test": {**RARE, "n": 0}})


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ({"outputs": {"x": "outputs.none"}}, "predict.outputs.x: outputs, of type dict, has no 'none', but "),
        ({"outputs": {"x": "outputs.complex"}}, "predict.outputs.x: complex cannot be written as JSON"),
        ({"outputs": {"x": "outputs.total"}}, "x is a tensor of shape [], but the batch has 4 samples"),
        ({"outputs": {"x": "outputs.lengths"}, "format": "safetensors"}, "F32[1] in one batch, but F32[4] in another"),
    ],
)
def test_outputs_that_cannot_be_written_are_told(tmp_path: Path, predicted: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as told:
        predict_here(tmp_path, model={"_target_": "test_predict.Odd"}, predict=predicted)
    assert message in told.value.message
    assert not list(tmp_path.glob("predictions-test.*ors"))


def test_names_of_outputs_are_checked_first() -> None:
    problems = find_problems(make("x", predict={"outputs": {"index": "outputs.logits", "y": "loss"}}))
    assert sorted(p.dotted for p in problems) == ["predict.outputs", "predict.outputs.y"]


def predict_to_s3(world: World, folder: str, url: str) -> None:
    predict(world, folder, {"predict": {"dir": url, "format": "safetensors"}})


def test_ranks_predict_to_an_object_store(tmp_path: Path, s3: str) -> None:
    run_ranks(predict_to_s3, 2, str(tmp_path), f"{s3}/predicted")
    found = load_safetensors(storage.read_bytes(f"{s3}/predicted/predictions-test.safetensors"))
    assert torch.equal(found["logits"], Rare(37).x)
    assert list(storage.find_files(f"{s3}/predicted")) == ["predictions-test.safetensors"]
