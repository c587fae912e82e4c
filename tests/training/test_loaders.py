"""Loaders in a job: as data.train, as data.eval, made by data.loader; resumed, on several ranks, and in a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job_documents import resolve
from ranks import run_ranks
from small_jobs import MORE, TRUST, Data, Net, at_step, make_document, make_loader, read_losses, train
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dsjob
import dsjob.deepspeed
from dsjob import storage
from dsjob.document.resolve import complete_job
from dsjob.errors import DataError
from dsjob.ranks.mesh import World, join_world
from dsjob.training import job

LOADER = {"_target_": "small_jobs.make_loader", "batch_size": 8}
PLAIN = {"_target_": "small_jobs.Net", "dropout": 0.0}


def follow_by_hand(batches: list[Any], steps: int) -> list[float]:
    """The losses of the job's model over these batches, again and again."""
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(folder: Path, data: dict[str, Any], **sections: Any) -> list[float]:
    trainer = {"train_batch": 8, "micro_batch": 8, "max_steps": 8, "seed": 0, **sections.pop("trainer", {})}
    trainer = {key: value for key, value in trainer.items() if value is not None}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    sections = {"model": PLAIN, "scheduler": None, "optimizer": sgd, **sections}
    return list(train(folder, data=data, trainer=trainer, **sections).values())


@pytest.mark.parametrize(
    "data",
    [
        {"train": LOADER},
        {"train": {"_target_": "small_jobs.Data"}, "loader": {"_target_": "torch.utils.data.DataLoader"}},
        {"train": {"_target_": "small_jobs.Data"}, "loader": {"_target_": "small_jobs.divide"}},
    ],
    ids=["data.train", "data.loader", "own function"],
)
def test_a_loaders_batches_are_trained_on_once_each(data: dict[str, Any], tmp_path: Path) -> None:
    losses = run(tmp_path, {**data, "shuffle": False})
    assert losses == pytest.approx(follow_by_hand(list(make_loader(batch_size=8)), 8), rel=1e-6)


def test_epochs_are_those_of_the_loader(tmp_path: Path) -> None:
    data = {"train": {**LOADER, "shuffle": True, "n": 36}}
    run(tmp_path, data, trainer={"max_steps": 99, "max_epochs": 2})
    records = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if "epoch" in record][-1] == 2
    assert len(read_losses(tmp_path)) == 10


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False, "n": 36}])
def test_a_run_resumed_in_an_epoch_has_the_losses_of_one_without_interruption(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = {"train": {**LOADER, **options}}
    whole = train(tmp_path / "whole", data=data, trainer={"micro_batch": 8})
    folder = tmp_path / "parts"

    def stop() -> None:
        raise KeyboardInterrupt

    MORE.append(at_step(7, stop))
    try:
        with pytest.raises(KeyboardInterrupt):
            train(folder, data=data, trainer={"micro_batch": 8}, checkpoint={"every": 3, "resume": "auto"})
    finally:
        MORE.clear()
    train(folder, data=data, trainer={"micro_batch": 8}, checkpoint={"every": 3, "resume": "auto"})
    assert read_losses(folder) == whole


def test_evaluation_reads_a_loader_with_batches_of_its_own_size(tmp_path: Path) -> None:
    evaluated = []
    for name, data in {"dataset": {"_target_": "small_jobs.Data", "n": 10}, "loader": {**LOADER, "n": 10}}.items():
        run(tmp_path / name, {"train": LOADER, "eval": {**data, **({"batch_size": 3} if name == "loader" else {})}})
        evaluated.append(json.loads(Path(tmp_path, name, "result.json").read_text())["metrics"]["eval/loss"])
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


def test_what_would_batch_a_loader_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is already a loader, so data.collate has no effect"):
        run(tmp_path, {"train": LOADER, "collate": {"_target_": "torch.utils.data.default_collate"}})
    with pytest.raises(DataError, match=r"batch_size 4, but trainer.micro_batch is 8"):
        run(tmp_path, {"train": {**LOADER, "batch_size": 4}})


# ---- several ranks


def run_on_rank(world: World, folder: str, data: dict[str, Any], stage: int) -> Any:
    trainer = {"train_batch": 8, "micro_batch": 8 // world.data_size, "max_steps": 8, "seed": 0, "log_every": 1}
    zero = {"stage": stage}
    document = make_document(
        folder, model=PLAIN, scheduler=None, data=data, trainer=trainer, callbacks={}, zero_optimization=zero
    )
    resolved = resolve(document, world_size=world.data_size)
    storage.make_folder(folder)
    try:
        job.run_job(complete_job(resolved), folder, world, TRUST)
    except DataError as error:
        return str(error)
    return list(read_losses(folder).values())


@pytest.mark.parametrize(
    ("data", "stage"),
    [
        ({"train": {**LOADER, "batch_size": 4, "shuffle": True}, "eval": {**LOADER, "n": 9}}, 2),
        ({"train": {"_target_": "small_jobs.Data"}, "loader": {"_target_": "torch.utils.data.DataLoader"}}, 0),
    ],
    ids=["data.train", "data.loader"],
)
def test_two_ranks_train_on_the_samples_that_one_would(data: dict[str, Any], stage: int, tmp_path: Path) -> None:
    two = run_ranks(run_on_rank, 2, str(tmp_path / "two"), data, stage)
    trainer = {"train_batch": 8, "micro_batch": 4, "max_steps": 8, "seed": 0}
    one = train(tmp_path / "one", model=PLAIN, scheduler=None, data=data, trainer=trainer)
    assert two[0] == pytest.approx(list(one.values()), rel=1e-5)


@pytest.mark.parametrize(
    ("train_on", "message"),
    [
        ("small_jobs.make_shorter", "data.train differs between ranks: 40 samples on rank 0, 39 samples on rank 1"),
        ("small_jobs.Streamed", "pass 1 ended after 4 batches on rank 1, but on rank 0 it has not ended yet"),
    ],
)
def test_ranks_that_read_different_amounts_are_told(train_on: str, message: str, tmp_path: Path) -> None:
    less = {"less": 8} if "Streamed" in train_on else {}
    found = run_ranks(run_on_rank, 2, str(tmp_path), {"train": {"_target_": train_on, **less}}, 2)
    assert all(message in told for told in found), found


def test_streams_of_any_length_end_together(tmp_path: Path) -> None:
    found = run_ranks(run_on_rank, 2, str(tmp_path), {"train": {"_target_": "small_jobs.Streamed", "n": 15}}, 0)
    assert len(found[0]) == 8


def test_evaluation_sets_of_other_lengths_are_told(tmp_path: Path) -> None:
    data = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.make_shorter"}}
    for told in run_ranks(run_on_rank, 2, str(tmp_path), data, 0):
        assert "data.eval differs between ranks: 40 samples on rank 0, 39 samples on rank 1" in told


# ---- programs

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}


def test_initialize_takes_a_loader_as_it_is() -> None:
    engine, _, loader, _ = dsjob.deepspeed.initialize(
        model=torch.nn.Linear(8, 1), training_data=make_loader(batch_size=4), config=CONFIG
    )
    assert loader is not None
    assert len(loader) == 10
    expected = list(make_loader(batch_size=4))
    for (x, y), (given, _) in zip(expected, loader, strict=True):
        assert torch.equal(x, given)
        engine.backward(mse_loss(engine(x), y))
        engine.step()
    with pytest.raises(DataError, match=r"training_data.*batch_size 8, but train_micro_batch_size_per_gpu is 4"):
        engine.deepspeed_io(make_loader(batch_size=8))


def share_in_a_program(world: World) -> Any:
    data = Data(40 - world.data_rank)
    try:
        dsjob.initialize(model=torch.nn.Linear(8, 1), training_data=data, config=CONFIG)
    except DataError as error:
        return str(error)
    return None


def test_a_program_is_told_of_datasets_that_differ() -> None:
    for told in run_ranks(share_in_a_program, 2):
        assert "training_data differs between ranks: 40 samples on rank 0, 39 samples on rank 1" in told


def test_a_plan_looks_at_a_loader_too() -> None:
    from dsjob.contract.spec import JobSpec, view
    from dsjob.training.probe import load_data

    document = resolve(make_document("run", data={"train": {**LOADER, "batch_size": 4}}), world_size=2)
    loader = load_data(view(JobSpec, document), 2, TRUST)
    assert loader.samples_per_epoch == 40
    assert next(iter(loader))[0].shape == (4, 8)
    assert isinstance(make_loader(), DataLoader)
    assert join_world(device="cpu").data_size == 1
