"""Decides which batches of a loader belong to this rank: all, if the loader differs by rank, else every world_size-th.

A DistributedSampler, or a `data.loader` that takes `rank`, shows that the loader divides the data itself. Otherwise the
ranks compare its first batches: if they are equal everywhere, the ranks take turns.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dsjob.data.order import mix_seed
from dsjob.data.workers import make_outliving
from dsjob.errors import DataError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World

# The options of a DataLoader, apart from its dataset and samplers. `load` copies them to a new DataLoader.
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class Share:
    """A loader, and which of its batches belong to this rank.

    divided: the loader gives each rank its own batches. A DistributedSampler implies it. For other loaders that do not
    select samples by index, the ranks compare their first batches, and take turns if these are the same. A collective,
    if there are several ranks. Raises DataError.
    """

    def __init__(self, loader: Any, *, world: World, seed: int, divided: bool, name: str) -> None:
        self.loader, self.name = loader, name
        if isinstance(loader, DataLoader):
            make_outliving(loader, name)
        self._world, self._seed = world, seed
        self._samplers = _find_samplers(loader)
        # A subclass may override __iter__, so that its samplers decide nothing.
        self.indexed = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
        self._bases: dict[int, int] = {}  # the original seeds of generators
        self.begun: Iterator[Any] | None = None  # the first pass, if its first batch was already read for comparison
        self.length = count_batches(loader)
        if self.length == 0:
            raise DataError(f"{name} ({type(loader).__name__}) is empty", hint="check its dataset and drop_last")
        self.divided = divided or world.data_size == 1 or self._is_divided()
        # Skip the comparison while planning: the plan describes ranks that do not exist, possibly in a process with a
        # different process group.
        if not self.divided and dist.is_initialized() and dist.get_world_size(world.data_group) == world.data_size:
            self._compare()

    @property
    def turn(self) -> tuple[int, int]:
        """(k, n): this rank's batches are the k-th of every n."""
        return (0, 1) if self.divided else (self._world.data_rank, self._world.data_size)

    def _is_divided(self) -> bool:
        """Whether a sampler divides the samples among ranks. Raises DataError if it does so for another rank."""
        for sampler in self._samplers:
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                found, own = (sampler.rank, sampler.num_replicas), (self._world.data_rank, self._world.data_size)
                if found != own:
                    raise DataError(
                        f"{self.name}: its {type(sampler).__name__} is for rank {found[0]} of {found[1]}, but this is"
                        f" data-parallel rank {own[0]} of {own[1]}",
                        hint="omit num_replicas and rank, or set them to those of this rank",
                    )
                return True
        return False

    def _compare(self) -> None:
        if self._world.model.size > 1:
            if self.indexed:
                return
            raise DataError(
                f"{self.name}: with trainer.mpu, dsjob cannot detect whether this loader differs by rank",
                hint="use a data.loader that takes `rank` and `world_size`",
            )
        # Compare indices if there are any: comparing batches would read and transform samples just for that.
        first = next(self.index(0), None) if self.indexed else self._peek()
        digests, lengths = zip(*all_gather(self._world.data, (_digest(first), self.length)), strict=True)
        # A batch that cannot be compared counts as different.
        same = digests[0] is not None and all(digest == digests[0] for digest in digests)
        if self.indexed and not same:
            raise DataError(
                f"{self.name}: the sampler {type(self._samplers[-1]).__name__} orders the samples differently on each"
                " rank, so ranks would repeat samples instead of dividing them",
                hint="give the sampler a `generator` or `set_epoch(epoch)`, or use a DistributedSampler",
            )
        # Different first batches on some ranks: the loader divides the data itself.
        self.divided = not same
        if same:
            self.require_same(lengths)

    def require_same(self, batches: Sequence[int | None]) -> None:
        """Raises DataError if ranks that take turns have different numbers of batches: one would wait for another."""
        if len(set(batches)) > 1:
            found = ", ".join("unknown" if each is None else f"{each:,}" for each in batches)
            raise DataError(
                f"{self.name} differs between ranks: the numbers of its batches are {found}",
                hint="build the same loader on every rank; dsjob divides its batches among them",
            )

    def _peek(self) -> Any:
        iterator = iter(self._start_pass(0))
        first = next(iterator, None)
        # Put the batch back: a stream may not be able to start again.
        self.begun = chain([] if first is None else [first], iterator)
        return first

    def read(self, epoch: int) -> Iterator[Any]:
        """One pass over the loader itself."""
        if epoch == 0 and self.begun is not None:
            begun, self.begun = self.begun, None
            return begun
        return iter(self._start_pass(epoch))

    def index(self, epoch: int) -> Iterator[Any]:
        """One pass over the indices of batches (of samples, if the loader does not batch them)."""
        loader = self._start_pass(epoch)
        return iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)

    def _start_pass(self, epoch: int) -> Any:
        """Prepares the loader for a pass, and returns it. Its order depends only on the seed and the pass's number.

        Generators are seeded equally on all ranks. Without one, torch would draw from the global generator, which
        differs by rank.
        """
        for part in (self.loader, *self._samplers, getattr(self.loader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for part in (self.loader, *self._samplers):
            if not hasattr(part, "generator"):
                continue
            if part.generator is None:
                part.generator = torch.Generator().manual_seed(self._seed)
            if isinstance(part.generator, torch.Generator):
                # Derived from the generator's original seed, not from its state: after a resume, any pass may be the
                # first to start.
                base = self._bases.setdefault(id(part.generator), part.generator.initial_seed())
                part.generator.manual_seed(mix_seed(base, epoch))
        return self.loader

    def load(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Loads the batches with these indices, with the loader's own options."""
        options: dict[str, Any] = {name: getattr(self.loader, name) for name in _OPTIONS if hasattr(self.loader, name)}
        if self.loader.batch_sampler is None:
            options |= {"sampler": batches, "batch_size": None}
        else:
            options |= {"batch_sampler": batches}
        generator = torch.Generator().manual_seed(self._seed + self._world.data_rank)  # seeds the workers
        return iter(DataLoader(self.loader.dataset, generator=generator, **options))


def count_batches(loader: Any) -> int | None:
    """The number of batches in one pass; None if the loader does not know it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _find_samplers(loader: Any) -> list[Any]:
    """The samplers of a DataLoader, the outer one first. Empty for any other loader."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        sampler = getattr(loader, "sampler", None)
        return [] if sampler is None else [sampler]
    return [batches, *([batches.sampler] if getattr(batches, "sampler", None) is not None else [])]


class _ByValue(pickle.Pickler):
    """Pickles tensors by value. torch's own pickles contain addresses of storages, so equal tensors would differ."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return bytes, (flat.numpy().tobytes(),), {"shape": tuple(value.shape), "dtype": str(value.dtype)}


def _digest(batch: Any) -> bytes | None:
    """A digest that is the same for equal batches. None if there is no batch, or if it cannot be pickled."""
    if batch is None:
        return None
    buffer = io.BytesIO()
    try:
        _ByValue(buffer).dump(batch)
    except Exception:  # pickling a user's object may raise anything
        return None
    return hashlib.sha256(buffer.getvalue()).digest()
