"""Loaders that a program or a job brings along: used as they are, begun again at the right batch, shared among ranks.

A loader is one sequence of batches, pass after pass. Where it is not divided among ranks by itself, they take turns:
the n-th batch is rank n % world_size's, so that the sequence of a run does not depend on the number of ranks.

Of a plain DataLoader over a map-style dataset only indices are read to pass over what other ranks have or what was
seen before a resume, with its own samplers, seeded by the pass. Random transforms in the workers of such a loader are
not repeated by a resume.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dsjob.data.batches import count_samples
from dsjob.data.epochs import Epochs, RepeatingLoader
from dsjob.data.passes import Passes
from dsjob.data.share import Share
from dsjob.errors import DataError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World


def is_loader(value: Any) -> bool:
    """Whether `value` gives batches: a DataLoader, or what has `batch_size`, `dataset` and an iterator as one has."""
    if isinstance(value, (DataLoader, RepeatingLoader, Epochs)):
        return True
    named = all(hasattr(value, name) for name in ("__iter__", "batch_size", "dataset"))
    return named and not isinstance(value, Dataset) and not hasattr(value, "__getitem__")


class GivenLoader:
    """This rank's micro batches out of a loader of the user's own, without end; `seek` goes to a resumed run's place.

    The loader is begun again whenever it ends. Seeking passes over batches: over their indices, where a DataLoader
    chooses samples by index, else over the batches themselves. `key`: what the micro batch is called in the config.
    Raises DataError for a batch size other than the micro batch.
    """

    def __init__(
        self,
        loader: Any,
        *,
        micro_batch: int,
        world: World,
        seed: int,
        divided: bool = False,
        name: str = "data.train",
        key: str = "trainer.micro_batch",
    ) -> None:
        self._micro_batch, self._world, self._key = micro_batch, world, key
        _require_batch_size(loader, micro_batch, name, key)
        self._share = Share(loader, world=world, seed=seed, divided=divided, name=name)
        self.dataset = getattr(loader, "dataset", loader)
        self.passes = Passes(name, strict=self._share.divided)
        self._start = 0
        length, ranks = self._share.length, world.data_size if self._share.divided else 1
        self.samples_per_epoch = None if length is None else length * micro_batch * ranks
        self._epoch = self._number = 0  # the pass, and the batches of the run before the next one
        self._told = self._restored = False

    def seek(self, samples: int) -> None:
        """Makes iteration begin after the first `samples` samples of the run (over all ranks)."""
        self._start = samples

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(once=False)

    def iterate_epoch(self, number: int, batches: int | None) -> Iterator[Any]:
        """This rank's batches of epoch `number`, of which there are `batches`; None: all until the loader ends."""
        self.seek(number * (batches or 0) * self._micro_batch * self._world.data_size)
        if self._share.divided or batches is None:
            return self._iterate(once=True)
        return islice(self, batches)

    def _iterate(self, *, once: bool) -> Iterator[Any]:
        indexed = self._share.indexed
        taken = self._take(self._share.index if indexed else self._share.read, once)
        for batch in self._share.load(taken) if indexed else taken:
            if not self._told:
                self._tell_size(batch)
            yield batch

    def _take(self, read: Callable[[int], Iterable[Any]], once: bool) -> Iterator[Any]:
        """What is this rank's in pass after pass of `read`, from this rank's place on."""
        share, skipped, restored = self._share, 0, self._restored
        if not restored:
            place = self._start // self._micro_batch
            self._number = place = place // self._world.data_size if share.divided else place
            self._epoch, skipped = divmod(place, share.length) if share.length else (0, place)
        self._restored = False
        own, every = share.turn
        while True:
            found = False
            for item in read(self._epoch):
                found = True
                if skipped:
                    skipped -= 1
                    continue
                self._number += 1
                if (self._number - 1) % every == own:
                    yield item
            if not (found or restored):
                self._explain_nothing()
            self.passes.end(self._number)
            restored = False
            if once:
                return
            self._epoch += 1

    def _explain_nothing(self) -> None:
        kind, again = type(self._share.loader).__name__, ", begun again," if self._epoch else ""
        raise DataError(
            f"{self._share.name} ({kind}){again} yields no batch on rank {self._world.data_rank}",
            hint="it has to give a new iterator each time it is iterated over" if self._epoch else "",
        )

    def _tell_size(self, batch: Any) -> None:
        self._told = True
        found = count_samples(batch)
        if found != self._micro_batch and self._world.data_rank == 0:
            told = f"{self._share.name} yields batches of {found}, but each is counted as {self._micro_batch} samples"
            warnings.warn(
                f"{told} ({self._key}): set {self._key} to {found} if all batches have that size", stacklevel=2
            )


class StatefulLoader(GivenLoader):
    """A loader with `state_dict` and `load_state_dict`, as torchdata's has them: checkpoints keep its state."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, and for which pass, batch and number of ranks it is valid."""
        state, ranks = self._share.loader.state_dict(), self._world.data_size
        return {"loader": state, "epoch": self._epoch, "number": self._number, "world_size": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place of `state`; of another number of ranks: leaves it to `seek`."""
        if state["world_size"] == self._world.data_size:
            self._share.loader.load_state_dict(state["loader"])
            self._share.begun = None  # it was begun before
            self._epoch, self._number, self._restored = state["epoch"], state["number"], True


def take_loader(loader: Any, **options: Any) -> GivenLoader:
    """The loader as micro batches of this rank; see GivenLoader."""
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return (StatefulLoader if stateful else GivenLoader)(loader, **options)


class LoaderEvaluation:
    """Evaluation batches out of a loader of the user's own; see EvaluationBatches for what iteration gives.

    Where the loader does not know its length, it is read once to count its batches.
    """

    def __init__(self, loader: Any, *, world: World, seed: int, divided: bool = False) -> None:
        if iter(loader) is loader:
            raise DataError(
                f"data.eval is an iterator ({type(loader).__name__}), which can be read once",
                hint="give an object whose __iter__ begins anew each time",
            )
        self._share = Share(loader, world=world, seed=seed, divided=divided, name="data.eval")
        self._share.begun = None
        self._world = world
        self._counted = self._share.length

    def limit(self, max_batches: int | None) -> EvaluationPass:
        """One evaluation, of at most `max_batches` batches a rank."""
        share, ranks = self._share, self._world.data_size
        every = share.turn[1]
        if self._counted is None:
            most = None if max_batches is None else max_batches * every
            total = sum(1 for _ in islice(share.read(0), most))
            self._counted = total if max_batches is None else None
        else:
            total = self._counted
        rounds = math.ceil(total / every)
        if share.divided and ranks > 1 and self._world.model.size == 1:
            lengths = all_gather(self._world.data, (rounds, total))
            rounds, total = max(found for found, _ in lengths), min(found for _, found in lengths)
        if not total:
            raise DataError(f"data.eval ({type(share.loader).__name__}) yields no batch, on one rank at least")
        return EvaluationPass(share, rounds if max_batches is None else min(rounds, max_batches))


class EvaluationPass:
    """One pass over a loader, in `rounds` rounds: this rank's batch of each with its number of samples, or weight 0."""

    def __init__(self, share: Share, rounds: int) -> None:
        self._share, self._rounds = share, rounds

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        share, first, given = self._share, None, 0
        batches = share.load(self._choose(share.index(0))) if share.indexed else self._choose(share.read(0))
        for given, batch in enumerate(islice(batches, self._rounds), start=1):  # noqa: B007
            first = batch if first is None else first
            yield batch, count_samples(batch)
        # The rest is what this rank has none left for; a rank without any batch of its own takes the very first.
        if given < self._rounds and first is None:
            indices = list(islice(share.index(0), 1)) if share.indexed else []
            first = next(share.load(indices) if share.indexed else share.read(0))
        for _ in range(given, self._rounds):
            yield first, 0

    def _choose(self, items: Iterable[Any]) -> Iterator[Any]:
        own, every = self._share.turn
        return islice(iter(items), own, None, every)


def _require_batch_size(loader: Any, micro_batch: int, name: str, key: str) -> None:
    sizes = (getattr(part, "batch_size", None) for part in (loader, getattr(loader, "batch_sampler", None)))
    size = next((size for size in sizes if isinstance(size, int)), None)
    if size is not None and size != micro_batch:
        raise DataError(
            f"{name} is a loader whose batches hold {size} samples, and {key} is {micro_batch}",
            hint=f"set {key} to {size}, or batch_size of the loader to {micro_batch}",
        )
