"""What goes wrong with data is told in one line, with the sample's index, from worker processes as from this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import dsjob, make_job
from torch.utils.data import IterableDataset, default_collate

from dsjob.data import EvaluationBatches, load_training
from dsjob.data.misfits import find_misfit
from dsjob.data.samples import raise_failures
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

WORLD = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))
WORKERS = pytest.mark.parametrize("workers", [0, 1])


class Picture:
    """Of a type that no batch is made of."""


class Given:
    """Eight samples, of which number 5 is given; an exception is raised instead."""

    def __init__(self, odd: Any, usual: Any = 1.0) -> None:
        self.odd, self.usual = odd, usual

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        sample = self.odd if index == 5 else self.usual
        if isinstance(sample, Exception):
            raise sample
        return sample() if callable(sample) else sample


class AtOnce(Given):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Streamed(IterableDataset[Any]):
    def __init__(self, given: Given) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return (self.given[index] for index in range(8))


def train(dataset: Any, workers: int = 0, collate: Callable[[Any], Any] | None = None) -> DataError:
    loader = load_training(
        dataset, micro_batch=4, world=WORLD, seed=0, shuffle=False, num_workers=workers, collate=collate
    )
    with pytest.raises(DataError) as caught:
        next(batch for number, batch in enumerate(loader) if number == 8)
    assert "\n" not in caught.value.message
    return caught.value


@WORKERS
@pytest.mark.parametrize(
    "error", [ValueError("broken\n  file"), KeyError("text"), UnicodeDecodeError("x", b"", 0, 1, "y")]
)
def test_a_sample_that_fails_is_named_with_its_place(workers: int, error: Exception) -> None:
    found = train(Given(error), workers)
    assert found.message.startswith(f"data.train[5] failed: {type(error).__name__}: ")
    assert f"(/{Path(__file__).relative_to('/')}:" in found.message
    assert found.hint == "run again with --debug for the traceback"
    assert found.__cause__ is not None
    assert "__getitem__" in str(found.__cause__) or not workers


def test_an_error_of_a_dataset_that_explains_itself_stays_as_it_is() -> None:
    for workers in (0, 1):
        found = train(Given(DataError("no such column", hint="columns: a, b")), workers)
        assert (found.message, found.hint) == ("no such column", "columns: a, b")


def test_of_samples_that_are_read_at_once_all_are_named() -> None:
    assert train(AtOnce(ValueError("x"))).message.startswith("data.train[4, 5, 6, 7] failed: ValueError: x")


@WORKERS
def test_a_stream_counts_its_samples(workers: int) -> None:
    found = train(Streamed(Given(ValueError("broken"))), workers)
    assert found.message.startswith("data.train failed after 5 samples: ValueError: broken (")


@WORKERS
def test_a_stream_names_a_sample_that_does_not_fit(workers: int) -> None:
    assert train(Streamed(Given(None)), workers).message == "data.train[5] is None"


TENSORS = ({"x": torch.zeros(3), "y": [1, 2]}, {"x": torch.zeros(5), "y": [1, 2]})


@pytest.mark.parametrize(
    ("usual", "odd", "message", "hint"),
    [
        (1.0, None, "data.train[5] is None", "drop them in data.collate"),
        ((1, 2), (1, None), "data.train[5][1] is None", "drop them in data.collate"),
        (
            *TENSORS,
            "the samples of a batch differ in size: data.train[4]['x'] has shape [3], data.train[5]['x'] has shape [5]",
            "pad them in data.collate",
        ),
        (
            {"a": [1, 2]},
            {"a": [1, 2, 3]},
            "the samples of a batch differ in size: data.train[4]['a'] has 2 items, data.train[5]['a'] has 3 items",
            "pad them in data.collate",
        ),
        ({"x": 1, "y": 2}, {"x": 1}, "data.train[5] lacks the key 'y', which data.train[4] has", "the same keys"),
        (
            {"x": 1},
            (1,),
            "data.train[4] is of type dict, but data.train[5] is of type tuple",
            "return the same type from every sample",
        ),
        (
            Picture,
            Picture,
            f"data.train[0] is of type {__name__}.Picture, which cannot be batched",
            "build batches in data.collate",
        ),
    ],
)
def test_samples_that_make_no_batch_are_explained(usual: Any, odd: Any, message: str, hint: str) -> None:
    found = train(Given(odd, usual))
    assert found.message == message
    assert hint in found.hint


def test_texts_of_different_lengths_are_padded_by_what_dsjob_has() -> None:
    found = find_misfit([("a", {"input_ids": torch.zeros(3)}), ("b", {"input_ids": torch.zeros(5)})])
    assert found is not None
    assert "dsjob.text.Pad" in found[1]


def test_a_key_too_many_is_a_misfit_as_well() -> None:
    found = find_misfit([("a", {"x": 1}), ("b", {"x": 1, "y": 2})])
    assert found is not None
    assert found[0] == "a lacks the key 'y', which b has"


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2.5],
        ["a", "bc"],
        [b"a", b"bc"],
        [np.zeros(2), np.ones(2)],
        [np.float32(1), np.float64(2)],
        [{"x": [1, (2.0, "a")]}, {"x": [3, (4.0, "b")]}],
        [{"x": torch.ones(())}, {"x": torch.zeros(())}],
    ],
)
def test_what_makes_a_batch_is_no_misfit(samples: list[Any]) -> None:
    default_collate(samples)
    assert find_misfit([(str(number), sample) for number, sample in enumerate(samples)]) is None


@WORKERS
def test_a_collate_function_that_fails_is_named(workers: int) -> None:
    found = train(Given(None), workers, collate=torch.tensor)
    assert found.message.startswith("data.collate failed on data.train[4, 5, 6, 7]: RuntimeError: ")
    assert found.hint == "data.train[5] is None"


def test_a_collate_function_may_drop_what_is_none() -> None:
    loader = load_training(
        Given(None), micro_batch=4, world=WORLD, seed=0, shuffle=False, collate=lambda items: [i for i in items if i]
    )
    batches = iter(loader)
    assert [len(next(batches)) for _ in range(2)] == [4, 3]


def test_a_worker_that_is_killed_is_told() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    found = train(Given(die), 1)
    assert found.message.startswith("a worker process of data.train has died: ")
    assert "data.num_workers" in found.hint


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOFError(), RuntimeError("DataLoader worker x")])
def test_a_worker_that_dies_while_its_batch_is_received_is_told(error: Exception) -> None:
    def receive() -> Iterator[Any]:
        yield torch.ones(1)
        raise error

    batches = raise_failures(receive(), "data.train")
    next(batches)
    with pytest.raises(DataError, match=rf"^a worker process of data\.train has died: {type(error).__name__}"):
        next(batches)


@pytest.mark.parametrize("dataset", [Given(ValueError("broken")), Streamed(Given(ValueError("broken")))])
def test_evaluation_names_its_samples(dataset: Any) -> None:
    with pytest.raises(DataError, match=r"^data\.eval(\[5\] failed| failed after 5 samples): ValueError: broken"):
        list(EvaluationBatches(dataset, micro_batch=4, world=WORLD, collate=None, max_batches=None))


@WORKERS
def test_a_run_tells_it_in_a_line_and_a_hint(tmp_path: Path, workers: int) -> None:
    make_job(tmp_path, data={"train": {"_target_": "my_model.Broken"}, "num_workers": workers})
    with (tmp_path / "my_model.py").open("a") as file:
        file.write("\nclass Broken(Data):\n    def __getitem__(self, i):\n        return self.x[i][: i % 3 + 1], i\n")
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert told[0].startswith("dsjob: error: the samples of a batch differ in size: data.train["), told
    assert len(told) == 2
