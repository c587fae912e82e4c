"""Processes that read data: the signals that a rank saves for do not end them."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dsjob.data import EvaluationBatches, load_training, take_loader
from dsjob.data.given import LoaderEvaluation
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

WORLD = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))
BEGUN = "BEGUN_BY_ITS_OWN"
signalled: set[int] = set()  # processes; a second SIGTERM, maybe while the next pass is read ahead, would end them


def signal_all(index: int) -> int:
    """A sample, before which the worker process gets what a terminal and a scheduler send to all processes."""
    if index == 2 and os.getpid() not in signalled:
        signalled.add(os.getpid())
        assert torch.utils.data.get_worker_info() is not None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    return index


class Signalled(Sequence[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> int:
        return signal_all(index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return map(signal_all, range(8))


class Own(Sequence[int]):
    """Whose worker has to be begun by the loader's own function."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> int:
        return signal_all(index) + int(os.environ[BEGUN])


def begin(number: int) -> None:
    os.environ[BEGUN] = "10"


def give(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=2, num_workers=1, **options)


def take(loader: Any) -> Any:
    return take_loader(loader, micro_batch=2, world=WORLD, seed=0)


OPTIONS: dict[str, Any] = {"micro_batch": 2, "world": WORLD, "num_workers": 1}
READ = {
    "training": lambda: load_training(Signalled(), seed=0, shuffle=False, **OPTIONS),
    "evaluation": lambda: (b for b, _ in EvaluationBatches(Signalled(), collate=None, max_batches=None, **OPTIONS)),
    "given": lambda: take(give(Signalled())),
    "given stream": lambda: take(give(Stream())),
    "given with a function": lambda: (batch - 10 for batch in take(give(Own(), worker_init_fn=begin))),
    "given twice": lambda: (batch - 10 for batch in take(take_twice(give(Own(), worker_init_fn=begin)))),
}


def take_twice(loader: DataLoader[Any]) -> DataLoader[Any]:
    take(loader)
    return loader


@pytest.mark.parametrize("kind", READ)
def test_workers_outlive_the_signal_that_their_rank_saves_for(kind: str) -> None:
    batches = [batch.tolist() for batch in islice(READ[kind](), 4)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("take", [partial(take_loader, micro_batch=1), LoaderEvaluation], ids=["train", "eval"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_with_a_million_workers_starts_none(take: Callable[..., object]) -> None:
    loader = DataLoader(Signalled(), num_workers=1_000_000)
    with pytest.raises(DataError, match=r"data\.test has num_workers=1,000,000, more than 1,024"):
        take(loader, world=WORLD, seed=0, name="data.test")
