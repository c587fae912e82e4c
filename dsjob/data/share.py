"""Which batches of a loader are a rank's: all of a loader that differs by rank, else every world_size-th.

Whether a loader is divided among ranks already shows in its first batches: equal ones on all ranks mean that they take
turns. A DistributedSampler, or a `data.loader` that takes `rank`, says so itself.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator
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

# What a DataLoader keeps of its arguments, beside the dataset and what chooses the samples.
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
    """A loader, and which of its batches are this rank's.

    `divided`: the loader gives each rank batches of its own, as does one with a DistributedSampler. Of any other one
    that does not choose samples by index the first batches are compared: where all ranks got the same, they take turns.
    A collective, for more than one rank. Raises DataError.
    """

    def __init__(self, loader: Any, *, world: World, seed: int, divided: bool, name: str) -> None:
        self.loader, self.name = loader, name
        if isinstance(loader, DataLoader):
            make_outliving(loader)
        self._world, self._seed = world, seed
        self._samplers = _find_samplers(loader)
        self.indexed = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
        self._bases: dict[int, int] = {}  # the seeds that generators came with
        self.begun: Iterator[Any] | None = None  # the first pass, where its first batch was looked at
        self.length = count_batches(loader)
        if self.length == 0:
            raise DataError(f"{name} ({type(loader).__name__}) is empty", hint="check its dataset and drop_last")
        self.divided = divided or world.data_size == 1 or self._is_divided()
        # A plan describes ranks that are not there, maybe in a process that has a group of its own.
        if not self.divided and dist.is_initialized() and dist.get_world_size(world.data_group) == world.data_size:
            self._compare()

    @property
    def turn(self) -> tuple[int, int]:
        """Which batches are this rank's: the k-th of every n."""
        return (0, 1) if self.divided else (self._world.data_rank, self._world.data_size)

    def _is_divided(self) -> bool:
        """Whether a sampler divides the samples. Raises DataError where it does so for other ranks."""
        for sampler in self._samplers:
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                found, own = (sampler.rank, sampler.num_replicas), (self._world.data_rank, self._world.data_size)
                if found != own:
                    raise DataError(
                        f"{self.name}: its {type(sampler).__name__} is that of rank {found[0]} of {found[1]}, and this"
                        f" is data-parallel rank {own[0]} of {own[1]}",
                        hint="leave num_replicas and rank out, or make it with those of this rank",
                    )
                return True
        return False

    def _compare(self) -> None:
        if self._world.model.size > 1:
            if self.indexed:
                return
            raise DataError(
                f"{self.name}: with trainer.mpu it cannot be seen whether this loader differs by rank",
                hint="name a data.loader that takes `rank` and `world_size`",
            )
        # Indices where there are any: comparing batches would read and transform samples that nobody trains on.
        first = next(self.index(0), None) if self.indexed else self._peek()
        digests = all_gather(self._world.data, _digest(first))
        same = digests[0] is not None and all(digest == digests[0] for digest in digests)
        if self.indexed and not same:
            raise DataError(
                f"{self.name}: the sampler {type(self._samplers[-1]).__name__} orders the samples differently on each"
                " rank, so that they would not be divided but repeated",
                hint="give the sampler a `generator` or `set_epoch(epoch)`, or use a DistributedSampler",
            )
        self.divided = not same

    def _peek(self) -> Any:
        iterator = iter(self._start_pass(0))
        first = next(iterator, None)
        # The batch that was looked at is given back, since a stream may not be able to start again.
        self.begun = chain([] if first is None else [first], iterator)
        return first

    def read(self, epoch: int) -> Iterator[Any]:
        """One pass over the loader itself."""
        if epoch == 0 and self.begun is not None:
            begun, self.begun = self.begun, None
            return begun
        return iter(self._start_pass(epoch))

    def index(self, epoch: int) -> Iterator[Any]:
        """One pass over the indices of batches (of samples, where the loader makes no batches)."""
        loader = self._start_pass(epoch)
        return iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)

    def _start_pass(self, epoch: int) -> Any:
        """The loader, told of the pass: its order is a function of the seed and of the pass's number.

        Generators are the same on all ranks; without one torch would draw from the global generator, which differs.
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
                # From the seed that the generator came with, not from its state: any pass can be started first, after a
                # resume too.
                base = self._bases.setdefault(id(part.generator), part.generator.initial_seed())
                part.generator.manual_seed(mix_seed(base, epoch))
        return self.loader

    def load(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of these indices, made as the loader makes them."""
        options: dict[str, Any] = {name: getattr(self.loader, name) for name in _OPTIONS if hasattr(self.loader, name)}
        if self.loader.batch_sampler is None:
            options |= {"sampler": batches, "batch_size": None}
        else:
            options |= {"batch_sampler": batches}
        generator = torch.Generator().manual_seed(self._seed + self._world.data_rank)  # seeds the workers
        return iter(DataLoader(self.loader.dataset, generator=generator, **options))


def count_batches(loader: Any) -> int | None:
    """The number of batches of one pass; None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _find_samplers(loader: Any) -> list[Any]:
    """The samplers of a DataLoader, the outer one first; none of anything else."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        sampler = getattr(loader, "sampler", None)
        return [] if sampler is None else [sampler]
    return [batches, *([batches.sampler] if getattr(batches, "sampler", None) is not None else [])]


class _ByValue(pickle.Pickler):
    """Writes tensors by their values: torch's own form of a storage holds its address."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return bytes, (flat.numpy().tobytes(),), {"shape": tuple(value.shape), "dtype": str(value.dtype)}


def _digest(batch: Any) -> bytes | None:
    """A digest by which equal batches are known; None of no batch, and of one that cannot be pickled."""
    if batch is None:
        return None
    buffer = io.BytesIO()
    try:
        _ByValue(buffer).dump(batch)
    except Exception:  # whatever an object of the user's raises
        return None
    return hashlib.sha256(buffer.getvalue()).digest()
