"""Reads and collates samples into batches. Errors name the index of the sample.

A worker process of a DataLoader could only send an error as the text of a traceback. Instead, it sends a `FailedBatch`,
and `raise_failures` raises the error where the batch is used.

In worker processes, random transforms are seeded by the sample's number. So they do not change with a resume, or with
the number of workers or ranks. A dataset with `__getitems__` reads a micro batch at once, seeded by the number of its
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
_MOST, _SHOWN = 400, 8  # in messages: characters of an error, and samples of a batch that are listed


class ByEpoch(Dataset[Any]):
    """A dataset whose samples differ by epoch: its method `read_in_epoch(index, epoch)` reads them. Here, the indices
    of epoch e begin at e * length."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __getitem__(self, index: int) -> Any:
        epoch, own = divmod(index, self._length)
        return self._dataset.read_in_epoch(own, epoch)


class Samples:
    """Makes batches from the samples of a dataset. name: the dataset's key in the document, for messages."""

    def __init__(self, dataset: Any, collate: Collate | None, name: str, seed: int = 0) -> None:
        self.dataset, self.name = dataset, name
        self._collate, self._seed = collate, seed

    def make_batch(self, indices: Sequence[int]) -> Any:
        """The batch of these samples. Raises DataError."""
        return self.collate(self.read_all(indices), indices)

    def read(self, index: int) -> Any:
        """One sample. Raises DataError."""
        with _RaiseAsDataError(f"{self.name}[{index}]"):
            return self.dataset[index]

    def read_all(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, in one call if the dataset supports it. Raises DataError."""
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None:
            return [self.read(index) for index in indices]
        with _RaiseAsDataError(f"{self.name}[{_list(indices)}]"):
            samples: list[Any] = at_once(indices)
            return samples

    def read_numbered(self, numbered: Iterable[tuple[int, int]]) -> list[Any]:
        """Reads samples by (index, number in the run). Random transforms depend only on the number. Raises DataError.

        The worker's own generators would depend on where the run was resumed, and on the number of workers and ranks.
        Samples that are read in one call are seeded by the number of the first, so they also depend on the micro batch.
        """
        numbered = list(numbered)
        if numbered and _reads_at_once(self.dataset):
            seed_rng(mix_seed(self._seed, numbered[0][1]))
            return self.read_all([index for index, _ in numbered])
        samples = []
        for index, number in numbered:
            # In a worker process, so the generators of training are not touched.
            seed_rng(mix_seed(self._seed, number))
            samples.append(self.read(index))
        return samples

    def collate(self, samples: list[Any], indices: Sequence[int]) -> Any:
        """Collates samples into a batch. indices: of the samples, for messages. Raises DataError."""
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
            raise DataError(
                f"{which} failed on {self.name}[{_list(indices)}]: {_shorten_error(error)}", hint=hint
            ) from error


@dataclass
class FailedBatch:
    """Replaces a batch that could not be made: the error, and in a worker, the text of its traceback."""

    error: DsjobError
    traceback: str = ""


class Batches(Dataset[Any]):
    """A dataset for a DataLoader with a batch sampler and `keep` as `collate_fn`: one item is a whole batch, or a
    FailedBatch.

    numbered: each index comes with the sample's number in the run.
    """

    def __init__(self, samples: Samples, *, numbered: bool) -> None:
        self._samples, self._numbered = samples, numbered

    def __getitems__(self, batch: list[Any]) -> Any:
        try:
            if self._numbered:
                return self._samples.collate(self._samples.read_numbered(batch), [index for index, _ in batch])
            return self._samples.make_batch(batch)
        except DsjobError as error:
            return pack_failure(error)


def number_stream(stream: Iterable[Any], name: str, first: int = 0) -> Iterator[Any]:
    """Yields (number, sample) of an iterable dataset, numbered from `first`. After an error, yields a FailedBatch
    endlessly."""
    number = first
    try:
        for sample in stream:
            yield number, sample
            number += 1
    except DsjobError as error:
        yield from repeat(pack_failure(error))
    except Exception as error:
        blamed = DataError(f"{name} failed after {number:,} samples: {_shorten_error(error)}", hint=TRACEBACK_HINT)
        blamed.__cause__ = error
        yield from repeat(pack_failure(blamed))  # repeated, because an incomplete last batch would be dropped


def keep(batch: Any) -> Any:
    """Returns the batch unchanged, as a `collate_fn` for items that are batches already."""
    return batch


def pack_failure(error: DsjobError) -> FailedBatch:
    """Packs `error` for the process that uses the batch."""
    if get_worker_info() is None:
        return FailedBatch(error)
    return FailedBatch(error, "".join(traceback.format_exception(error)))


def raise_failures(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """Yields the batches of a loader. Raises the error of a FailedBatch, and DataError if a worker process has died."""
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            # Errors of reading arrive as FailedBatch. An OSError or EOFError here means that a worker died between
            # sending a batch and handing over the file descriptors of its tensors.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            hint = "it may have run out of memory: reduce data.num_workers, or in a container, enlarge /dev/shm"
            raise DataError(f"a worker process of {name} has died: {_shorten_error(error)}", hint=hint) from error
        if isinstance(batch, FailedBatch):
            # End the workers now: the traceback would keep the iterator alive, and its workers would be waited for.
            del iterator
            cause = batch.error.__cause__ or (_InWorker(f"\n{batch.traceback}") if batch.traceback else None)
            raise batch.error from cause
        yield batch


class _InWorker(Exception):  # noqa: N818 (shown as a cause, never caught)
    """The traceback of a worker process."""


class _RaiseAsDataError:
    """Turns errors of the user's code into a DataError that begins with `what`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, DsjobError):
            raise DataError(f"{self._what} failed: {_shorten_error(error)}", hint=TRACEBACK_HINT) from error


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset has __getitems__. A Subset always has it, so what counts is the dataset inside."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def _shorten_error(error: Exception) -> str:
    """An error on one line."""
    text = " ".join(describe_failure(error).split())
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"


def _list(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN]))
    return f"{shown}, ..." if len(indices) > _SHOWN else shown
