"""From indices to batches: samples are read and put together here, and what goes wrong is told with the sample's index.

A loader's worker process could only send the text of a traceback; it sends a `Spoilt` batch in its place instead, and
`require_sound` raises the error where the batch is used.

In worker processes random transforms are seeded by the sample's number, so neither a resume nor another number of
workers or ranks changes them. A dataset with `__getitems__` reads a micro batch at once, seeded by the number of its
first sample.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch.utils.data import Dataset, Subset, default_collate, get_worker_info

from dsjob.data.misfits import find_misfit
from dsjob.data.order import mix_seed
from dsjob.errors import DataError, DsjobError
from dsjob.ranks.seeding import seed_rng
from dsjob.trust.frames import TRACEBACK_HINT, describe_failure

Collate = Callable[[list[Any]], Any]
_MOST, _SHOWN = 400, 8  # characters of an error that is told, samples of a batch that are listed


class Samples:
    """The samples of a map-style dataset in batches. `name`: what a document calls the dataset."""

    def __init__(self, dataset: Any, collate: Collate | None, name: str, seed: int = 0) -> None:
        self.dataset, self.name = dataset, name
        self._collate, self._seed = collate, seed

    def make_batch(self, indices: Sequence[int]) -> Any:
        """The batch of these samples. Raises DataError."""
        return self.collate(self.read_all(indices), indices)

    def read(self, index: int) -> Any:
        """One sample. Raises DataError."""
        with _Blaming(f"{self.name}[{index}]"):
            return self.dataset[index]

    def read_all(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, at once where the dataset can. Raises DataError."""
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None:
            return [self.read(index) for index in indices]
        with _Blaming(f"{self.name}[{_list(indices)}]"):
            samples: list[Any] = at_once(indices)
            return samples

    def read_numbered(self, numbered: Iterable[tuple[int, int]]) -> list[Any]:
        """Samples by index and number in the run, on which alone random transforms depend. Raises DataError.

        A worker's own generators would tell where the run was resumed, and how many workers and ranks there are. What
        is read at once depends on the number of the first: on the micro batch as well.
        """
        numbered = list(numbered)
        if numbered and _reads_at_once(self.dataset):
            seed_rng(mix_seed(self._seed, numbered[0][1]))
            return self.read_all([index for index, _ in numbered])
        samples = []
        for index, number in numbered:
            seed_rng(mix_seed(self._seed, number))
            samples.append(self.read(index))
        return samples

    def collate(self, samples: list[Any], indices: Sequence[int]) -> Any:
        """A batch of samples, which have these `indices`. Raises DataError."""
        try:
            return (self._collate or default_collate)(samples)
        except DsjobError:
            raise
        except Exception as error:
            named = [(f"{self.name}[{index}]", sample) for index, sample in zip(indices, samples, strict=False)]
            found = find_misfit(named)
            if self._collate is None and found:
                raise DataError(found[0], hint=found[1]) from error
            which = "data.collate" if self._collate else "making a batch"
            hint = found[0] if found else TRACEBACK_HINT
            raise DataError(f"{which} failed on {self.name}[{_list(indices)}]: {_tell(error)}", hint=hint) from error


@dataclass
class Spoilt:
    """In the place of a batch that could not be made: why not, and the traceback in a worker."""

    error: DsjobError
    traceback: str = ""


class Batches(Dataset[Any]):
    """`Samples` as a DataLoader reads them by a batch sampler, with `keep` for `collate_fn`: whole batches, or Spoilt.

    `numbered`: indices come with the sample's number in the run.
    """

    def __init__(self, samples: Samples, *, numbered: bool) -> None:
        self._samples, self._numbered = samples, numbered

    def __getitems__(self, batch: list[Any]) -> Any:
        try:
            if self._numbered:
                return self._samples.collate(self._samples.read_numbered(batch), [index for index, _ in batch])
            return self._samples.make_batch(batch)
        except DsjobError as error:
            return spoil(error)


class StreamCollate:
    """Makes batches of what `tell_stream` gives."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __call__(self, numbered: list[Any]) -> Any:
        for item in numbered:
            if isinstance(item, Spoilt):
                return item
        try:
            return self._samples.collate([sample for _, sample in numbered], [number for number, _ in numbered])
        except DsjobError as error:
            return spoil(error)


def tell_stream(stream: Iterable[Any], name: str) -> Iterator[Any]:
    """The samples of an iterable dataset with their numbers; Spoilt without end once one could not be read."""
    number = 0
    try:
        for sample in stream:
            yield number, sample
            number += 1
    except DsjobError as error:
        yield from repeat(spoil(error))
    except Exception as error:
        blamed = DataError(f"{name} failed after {number:,} samples: {_tell(error)}", hint=TRACEBACK_HINT)
        blamed.__cause__ = error
        yield from repeat(spoil(blamed))  # a last batch that is not full would be dropped


def keep(batch: Any) -> Any:
    """The batch as it is: made already."""
    return batch


def spoil(error: DsjobError) -> Spoilt:
    """`error` for the process that uses the batch."""
    if get_worker_info() is None:
        return Spoilt(error)
    return Spoilt(error, "".join(traceback.format_exception(error)))


def require_sound(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """The batches of a loader. Raises the error of one that is Spoilt, DataError where a worker process has ended."""
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            # Errors of reading are Spoilt batches. An OSError or EOFError here means that a worker died between
            # sending a batch and handing over the file descriptors of its tensors.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            hint = "memory may have run out: fewer data.num_workers, or in a container a larger /dev/shm"
            raise DataError(f"a worker process that reads {name} has ended: {_tell(error)}", hint=hint) from error
        if isinstance(batch, Spoilt):
            del iterator  # its workers end here: kept alive by the traceback, they would be waited for for 5 s
            cause = batch.error.__cause__ or (_InWorker(f"\n{batch.traceback}") if batch.traceback else None)
            raise batch.error from cause
        yield batch


class _InWorker(Exception):  # noqa: N818 (a cause that is shown, never caught)
    """The traceback of a worker process."""


class _Blaming:
    """Renames errors of the user's code into a DataError that begins with `what`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, DsjobError):
            raise DataError(f"{self._what} failed: {_tell(error)}", hint=TRACEBACK_HINT) from error


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset reads several samples at once; a Subset says that it does, and leaves it to its dataset."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def _tell(error: Exception) -> str:
    """An error on one line."""
    told = " ".join(describe_failure(error).split())
    return told if len(told) <= _MOST else f"{told[: _MOST // 2]} ... {told[-_MOST // 2 :]}"


def _list(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN]))
    return f"{shown}, ..." if len(indices) > _SHOWN else shown
