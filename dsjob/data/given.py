"""Uses loaders that the user provides: divides their batches among ranks, and resumes them at the right batch.

A loader is treated as one sequence of batches, pass after pass. Unless it divides the data among ranks itself, the
ranks take turns: batch n belongs to rank n % world_size, so the run sees the same sequence on any number of ranks.

For a plain DataLoader over a map-style dataset, batches of other ranks, and those seen before a resume, are skipped by
their indices only, using the loader's own samplers seeded per pass. A resume does not reproduce random transforms in
the workers of such a loader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dsjob.data.batches import count_samples
from dsjob.data.epochs import Epochs, RepeatingLoader
from dsjob.data.passes import Passes
from dsjob.data.replay import Replay
from dsjob.data.share import Share
from dsjob.errors import DataError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.terminal import warn


def is_loader(value: Any) -> bool:
    """Whether `value` is a loader rather than a dataset: a DataLoader, or an iterable with `batch_size` and
    `dataset`."""
    if isinstance(value, (DataLoader, RepeatingLoader, Epochs)):
        return True
    named = all(hasattr(value, name) for name in ("__iter__", "batch_size", "dataset"))
    return named and not isinstance(value, Dataset) and not hasattr(value, "__getitem__")


class GivenLoader:
    """This rank's micro batches from a loader of the user, endlessly. `seek` moves to the position of a resumed run.

    The loader is started again whenever it ends. Seeking skips indices if a DataLoader selects samples by index, and
    otherwise reads and drops whole batches. key: the name of the micro batch size in the config, for messages. Raises
    DataError if the loader's batch size is not the micro batch.
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
        # `length` counts batches: this rank's if the loader divides the data, otherwise those of all ranks.
        length, ranks = self._share.length, world.data_size if self._share.divided else 1
        self.samples_per_epoch = None if length is None else length * micro_batch * ranks
        self._epoch = self._number = 0  # the current pass, and the number of batches read so far in the run
        self._checked_size = self._restored = False
        self.say: Callable[[str], None] | None = None  # shows the user how far a replay is

    def seek(self, samples: int) -> None:
        """Makes iteration start after the first `samples` samples of the run (over all ranks)."""
        self._start = samples

    def describe_replay(self) -> str | None:
        """Says how many samples are read again before the first batch, if any."""
        again = self._count_replay()
        if not again:
            return None
        kind = type(self._share.loader).__name__
        why = "it is no plain DataLoader over a map-style dataset, and a checkpoint contains no state of it"
        return f"reading {again:,} samples of {self._share.name} ({kind}) again, because {why}"

    def _count_replay(self) -> int:
        """The samples that this process reads and drops. Indices are skipped without reading."""
        return 0 if self._share.indexed or self._restored else self._find_place()[1] * self._micro_batch

    def _find_place(self) -> tuple[int, int]:
        """Whole passes that were seen before, and batches of the current one."""
        place = self._count_batches()
        return divmod(place, self._share.length) if self._share.length else (0, place)

    def _count_batches(self) -> int:
        """Batches that were seen before: of this rank if the loader divides the data, otherwise of all ranks."""
        place = self._start // self._micro_batch
        return place // self._world.data_size if self._share.divided else place

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(once=False)

    def iterate_epoch(self, number: int, batches: int | None) -> Iterator[Any]:
        """This rank's batches of epoch `number`. `batches`: how many; None: all until the loader ends."""
        self.seek(number * (batches or 0) * self._micro_batch * self._world.data_size)
        if self._share.divided or batches is None:
            return self._iterate(once=True)
        return islice(self, batches)

    def _iterate(self, *, once: bool) -> Iterator[Any]:
        indexed = self._share.indexed
        replay = Replay(again, self._share.name, self.say) if (again := self._count_replay()) and not once else None
        taken = self._take(self._share.index if indexed else self._share.read, once, replay)
        taken = taken if replay is None else replay.follow(taken)
        for batch in self._share.load(taken) if indexed else taken:
            if not self._checked_size:
                self._check_size(batch)
            yield batch

    def _take(self, read: Callable[[int], Iterable[Any]], once: bool, replay: Replay | None) -> Iterator[Any]:
        """This rank's items in pass after pass of `read`, starting from its current position. `replay` counts what is
        dropped."""
        share, skipped, restored = self._share, 0, self._restored
        if not restored:
            self._number, (self._epoch, skipped) = self._count_batches(), self._find_place()
        self._restored = False
        # This rank takes the own-th of every `every` items.
        own, every = share.turn
        while True:
            found = False
            for item in read(self._epoch):
                found = True
                if skipped:
                    skipped -= 1
                    if replay is not None:
                        replay.add(self._micro_batch)
                    continue
                self._number += 1
                if (self._number - 1) % every == own:
                    yield item
            # A restored loader may be at the very end of its pass.
            if not (found or restored):
                self._explain_nothing()
            self.passes.end(self._number)
            restored = False
            if once:
                return
            self._epoch += 1

    def _explain_nothing(self) -> None:
        kind, again = type(self._share.loader).__name__, " when it is started again" if self._epoch else ""
        raise DataError(
            f"{self._share.name} ({kind}) yields no batch on rank {self._world.data_rank}{again}",
            hint="its __iter__ must return a new iterator each time" if self._epoch else "",
        )

    def _check_size(self, batch: Any) -> None:
        """Warns if the first batch does not have the size of a micro batch: progress would be counted wrongly."""
        self._checked_size = True
        found = count_samples(batch)
        if found != self._micro_batch and self._world.data_rank == 0:
            problem = f"{self._share.name} yields batches of {found} samples, but {self._key} is {self._micro_batch}"
            warn(f"{problem}: set {self._key} to {found} if all batches have that size", stacklevel=2)


class StatefulLoader(GivenLoader):
    """A loader with `state_dict` and `load_state_dict`, such as torchdata's. Checkpoints contain its state."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, and the pass, batch and number of ranks that it belongs to."""
        state, ranks = self._share.loader.state_dict(), self._world.data_size
        return {"loader": state, "epoch": self._epoch, "number": self._number, "world_size": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the loader's position. If the number of ranks has changed, this does nothing, and `seek` does it."""
        if state["world_size"] == self._world.data_size:
            self._share.loader.load_state_dict(state["loader"])
            self._share.begun = None  # drop the pass that was started before the state was loaded
            self._epoch, self._number, self._restored = state["epoch"], state["number"], True


def take_loader(loader: Any, **options: Any) -> GivenLoader:
    """Wraps a user's loader; see GivenLoader for the options."""
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return (StatefulLoader if stateful else GivenLoader)(loader, **options)


class LoaderEvaluation:
    """Evaluation batches from a loader of the user. Iteration yields the same as EvaluationBatches.

    If the loader has no length, it is read once to count its batches. name: the key of its data in the document.
    """

    def __init__(self, loader: Any, *, world: World, seed: int, divided: bool = False, name: str = "data.eval") -> None:
        if isinstance(loader, Iterator):  # `iter` would start the workers of a DataLoader
            raise DataError(
                f"{name} is an iterator ({type(loader).__name__}), which can be read only once",
                hint="return an object whose __iter__ starts again each time",
            )
        self._share = Share(loader, world=world, seed=seed, divided=divided, name=name)
        self._share.begun = None
        self._world = world
        self._counted = self._share.length

    @property
    def divided(self) -> bool:
        """Whether the loader gives each rank batches of its own."""
        return self._share.divided

    def limit(self, max_batches: int | None) -> EvaluationPass:
        """One evaluation with at most `max_batches` batches per rank."""
        share, ranks = self._share, self._world.data_size
        # A round is one forward pass on each rank. It takes `every` batches from the loader.
        every = share.turn[1]
        if self._counted is None:
            most = None if max_batches is None else max_batches * every
            total = sum(1 for _ in islice(share.read(0), most))
            self._counted = total if max_batches is None else None
        else:
            total = self._counted
        rounds = math.ceil(total / every)
        if ranks > 1 and self._world.model.size == 1 and (share.divided or share.length is None):
            lengths = all_gather(self._world.data, (rounds, total))
            if not share.divided:
                share.require_same([total for _, total in lengths])
            # All ranks must make the same number of forward passes: those of the longest loader.
            rounds, total = max(each for each, _ in lengths), min(each for _, each in lengths)
        if not total:
            raise DataError(f"{share.name} ({type(share.loader).__name__}) yields no batch on at least one rank")
        return EvaluationPass(share, rounds if max_batches is None else min(rounds, max_batches))


class EvaluationPass:
    """One pass over a loader in `rounds` rounds. Yields this rank's batch of each round, and its weight: the number of
    samples, or 0 for a batch that only keeps the ranks together."""

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
        # In the remaining rounds, this rank has no batch left, but must take part in the forward passes of a sharded
        # model. It repeats its first batch with weight 0, or the first batch of all if it has none.
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
            f"{name} is a loader with batch_size {size}, but {key} is {micro_batch}",
            hint=f"set {key} to {size}, or the loader's batch_size to {micro_batch}",
        )
