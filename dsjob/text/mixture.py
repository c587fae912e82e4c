"""Several datasets as one, in given proportions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from dsjob.data.order import mix_seed
from dsjob.data.permutation import Permutation
from dsjob.errors import DataError

_KEPT = 1000  # orders, of a few numbers each


class Mixture(Dataset[Any]):
    """Samples of several map-style datasets, in the proportions of `weights`.

    An epoch has as many samples as all datasets together. A dataset with more than its share of them contributes some
    of its samples, and goes on with the others in the next epoch; one with less repeats them. With data.group_by_length
    and in evaluations, each epoch has the same samples. data.shuffle mixes the datasets.

    Args:
        datasets: the datasets.
        weights: how many samples come from each, relative to the others; by default, each counts as much as it has.
        seed: orders the samples of each dataset.

    Raises:
        DataError: no dataset, or a weight for each that is not positive.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float] | None = None, seed: int = 0) -> None:
        if not isinstance(datasets, Sequence):
            raise DataError(f"datasets is one {type(datasets).__name__}, not a list", hint="write a list of datasets")
        for number, dataset in enumerate(datasets):
            if not hasattr(dataset, "__len__"):
                kind = type(dataset).__name__
                raise DataError(f"datasets[{number}] ({kind}) has no length", hint="use map-style datasets")
        sizes = [len(dataset) for dataset in datasets]
        if not sizes or not all(sizes):
            raise DataError("a mixture needs datasets, each with at least one sample")
        shares = _check_weights(sizes if weights is None else weights, len(sizes))
        self.datasets = list(datasets)
        # Where the samples of each dataset end; rounded so that the last ends at the whole.
        self._ends = np.rint(np.cumsum(shares) / sum(shares) * sum(sizes)).astype(np.int64)
        self._seed = seed
        self._orders: dict[tuple[int, int], Permutation] = {}  # by dataset and pass

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def lengths(self) -> Any:
        """The lengths of all samples, if every dataset has `lengths`. int64 [len(self)]."""
        parts = []
        for which, dataset in enumerate(self.datasets):
            first = self._ends[which - 1] if which else 0
            share, own = int(self._ends[which] - first), np.asarray(dataset.lengths)
            for number in range(-(-share // len(dataset))):
                places = np.arange(min(share - number * len(dataset), len(dataset)))
                parts.append(own[self._order(which, number)[places]])
        return np.concatenate(parts)

    def __getitem__(self, index: int) -> Any:
        return self.read_in_epoch(index, 0)

    def read_in_epoch(self, index: int, epoch: int) -> Any:
        """Sample `index` of an epoch. Each dataset is read pass after pass, in another order each."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[which - 1] if which else 0)
        share = int(self._ends[which]) - first
        number, place = divmod(epoch * share + index - first, len(self.datasets[which]))
        return self.datasets[which][int(self._order(which, number)[np.array([place])][0])]

    def _order(self, which: int, number: int) -> Permutation:
        """The order of a dataset in a pass over it."""
        if (which, number) not in self._orders:
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            self._orders[which, number] = Permutation(len(self.datasets[which]), mix_seed(self._seed, number))
        return self._orders[which, number]


def _check_weights(weights: Any, datasets: int) -> list[float]:
    given = list(weights) if isinstance(weights, Iterable) else []
    shares = [float(share) for share in given if isinstance(share, (int, float)) and 0 < share < float("inf")]
    if len(shares) != datasets or len(given) != datasets:
        hint = "give one positive number for each dataset"
        raise DataError(f"weights is {weights!r}, but there are {datasets} datasets", hint=hint)
    return shares
