"""Permutations of 0 .. length-1 that are computed index by index, so that they need no memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_ROUNDS = 6


class Permutation:
    """A pseudorandom permutation of range(length), chosen by `seed`. `permutation[places]` is the values there.

    A Feistel network over a rectangle of a x b >= length cells, as in Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains" (2002): cell x is (x mod a, x div a). Each round adds a hash of one coordinate to the other, which can be
    undone, so the rounds together permute the cells. A value beyond the end is permuted again until it is below
    `length`. Since a x b < length + a, few values are.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        # The smallest rectangle that is close to a square.
        self._width = np.uint64(math.isqrt(max(length - 1, 0)) + 1)
        self._height = np.uint64(-(-length // int(self._width)))
        # Hash the seed first: neighbouring seeds would share the keys of some rounds.
        start = _hash(np.array(seed % 2**64, dtype=np.uint64), np.uint64(0))
        self._keys = _hash(np.arange(_ROUNDS, dtype=np.uint64), np.uint64(start))

    def __getitem__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The values at these places, of the same shape. places: int64, each in range(length)."""
        values = self._permute_cells(places.astype(np.uint64))
        beyond = values >= self.length
        while beyond.any():
            values[beyond] = self._permute_cells(values[beyond])
            beyond = values >= self.length
        return values.astype(np.int64)

    def _permute_cells(self, cells: Words) -> Words:
        # All are uint64: numpy would turn a mix with int64 into float64, which is exact only up to 2**53.
        x, y = cells % self._width, cells // self._width
        for number, key in enumerate(self._keys):
            # Reduce the hash before the addition: a sum that wraps around at 2**64 could not be undone.
            if number % 2:
                y = (y + _hash(x, key) % self._height) % self._height
            else:
                x = (x + _hash(y, key) % self._width) % self._width
        return y * self._width + x


def _hash(values: Words, key: np.uint64) -> Words:
    """A hash of each value, all 64 bits well mixed: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        mixed = (values ^ key) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
