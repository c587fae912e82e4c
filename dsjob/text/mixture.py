"""Several datasets as one, in given proportions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from dsjob.data.permutation import Permutation
from dsjob.errors import DataError


class Mixture(Dataset[Any]):
    """Samples of several map-style datasets, in the proportions of `weights`.

    An epoch has as many samples as all datasets together. A dataset with more than its share of them contributes some
    of its samples, one with less repeats them. data.shuffle mixes the datasets.

    Args:
        datasets: the datasets.
        weights: how many samples come from each, relative to the others; by default, each counts as much as it has.
        seed: chooses the samples of a dataset that contributes only some.

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
        self._orders = [Permutation(size, seed) for size in sizes]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def lengths(self) -> Any:
        """The lengths of all samples, if every dataset has `lengths`. int64 [len(self)]."""
        parts = []
        for which, dataset in enumerate(self.datasets):
            first = self._ends[which - 1] if which else 0
            places = np.arange(self._ends[which] - first) % len(dataset)
            parts.append(np.asarray(dataset.lengths)[self._orders[which][places]])
        return np.concatenate(parts)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        place = (index - int(self._ends[which - 1] if which else 0)) % len(self.datasets[which])
        return self.datasets[which][int(self._orders[which][np.array([place])][0])]


def _check_weights(weights: Any, datasets: int) -> list[float]:
    given = list(weights) if isinstance(weights, Iterable) else []
    shares = [float(share) for share in given if isinstance(share, (int, float)) and 0 < share < float("inf")]
    if len(shares) != datasets or len(given) != datasets:
        hint = "give one positive number for each dataset"
        raise DataError(f"weights is {weights!r}, but there are {datasets} datasets", hint=hint)
    return shares
