"""Training batches of an iterable dataset: resumable, on any number of ranks.

A batch comes from one lane (`dsjob/data/lanes.py`), and from one round of it: `ranks x micro_batch` samples, of which
each of the ranks that share the lane takes every ranks-th. So ranks that share a lane have equally many batches. A rank
with several lanes reads a batch from each in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dsjob.data.lanes import Lane, Position, Share, count_lanes, divide_lanes, has_shuffle_buffer, has_state
from dsjob.data.loader import TrainingLoader, count_dataset
from dsjob.data.passes import Passes
from dsjob.data.replay import Replay
from dsjob.data.samples import Collate, FailedBatch, Samples, keep, pack_failure, raise_failures
from dsjob.data.workers import choose_options
from dsjob.errors import DataError, DsjobError
from dsjob.ranks.mesh import World
from dsjob.terminal import warn

_LARGEST = 900_000  # bytes of a dataset's states on a rank; a checkpoint takes 1 MiB


def load_training(
    dataset: Any,
    *,
    name: str = "data.train",
    shuffle: bool = True,
    shuffle_buffer: int = 0,
    grouped: int | None = None,
    **options: Any,
) -> TrainingLoader | StreamLoader:
    """The loader of a dataset for training; see the classes for the options. Raises DataError."""
    length = count_dataset(dataset, name)
    if length is not None:
        if shuffle_buffer:
            kind, advice = type(dataset).__name__, "leave it out: data.shuffle shuffles the whole dataset"
            raise DataError(f"data.shuffle_buffer is for iterable datasets; {name} ({kind}) has a length", hint=advice)
        return TrainingLoader(dataset, length, name=name, shuffle=shuffle, grouped=grouped, **options)
    if grouped is not None:
        kind = type(dataset).__name__
        raise DataError(f"data.group_by_length needs a dataset with a length; {name} ({kind}) is iterable")
    return StreamLoader(dataset, name=name, shuffle_buffer=shuffle_buffer if shuffle else 0, **options)


class StreamLoader:
    """This rank's micro batches of an iterable dataset, endlessly. Checkpoints contain its position.

    Without that (`seek` alone), it reads the dataset from the start, and drops the samples that the run has seen.
    shuffle_buffer: how many samples of a lane are shuffled together.
    """

    samples_per_epoch: int | None = None

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch: int,
        world: World,
        seed: int,
        collate: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        name: str = "data.train",
        shuffle_buffer: int = 0,
    ) -> None:
        self.dataset, self.passes = dataset, Passes(name)
        self._shuffling = {"window": shuffle_buffer, "seed": seed}
        self._micro_batch, self._world, self._name = micro_batch, world, name
        self._samples = Samples(dataset, collate, name, seed)
        self._options = choose_options(world, seed, num_workers=num_workers, pin_memory=pin_memory)
        self._start = 0
        self._lanes = count_lanes(dataset, world.data_size, num_workers)
        self._positions: dict[int, Position] = {}  # by lane
        self._turn = 0  # the place in this rank's lanes of the one that comes next
        self._restored = self._warned = False
        self.say: Callable[[str], None] | None = None  # shows the user how far a replay is
        if has_shuffle_buffer(dataset) and world.data_rank == 0:
            lost = "a resumed run never sees the samples in it, and continues in another order"
            what = f"{name} ({type(dataset).__name__}): checkpoints do not contain its shuffle buffer, so {lost}"
            instead = "for an exact resume, set data.shuffle_buffer instead of calling shuffle(buffer_size=...)"
            warn(f"{what}; {instead}", stacklevel=2)

    def seek(self, samples: int) -> None:
        """Tells how many samples the run has seen (over all ranks)."""
        self._start = samples

    def state_dict(self) -> dict[str, Any]:
        """The positions in this rank's lanes, after the batch that was taken last."""
        own = {share.lane for share in self._shares()}  # after a resume, the positions of all ranks are known
        read = [(lane, asdict(position)) for lane, position in self._positions.items() if lane in own]
        self._drop_unsavable([position for _, position in read])
        return {"lanes": self._lanes, "ranks": self._world.data_size, "turn": self._turn, "read": read}

    def _drop_unsavable(self, positions: list[dict[str, Any]]) -> None:
        """Leaves out the dataset's own states if a checkpoint cannot hold them: a resume then reads the samples of the
        current pass again, lane by lane, and continues in the same order."""
        try:
            size = len(json.dumps([position["state"] for position in positions], skipkeys=True, default=_stand_in))
            why = f"it has {size:,} bytes; the limit is {_LARGEST:,}" if size > _LARGEST else ""
        except (TypeError, ValueError) as error:
            why = str(error)
        if not why:
            return
        for position in positions:
            position["state"] = position["before"] = None
        if not self._warned:
            self._warned = True
            what = f"checkpoints will not contain the state of {self._name} ({type(self.dataset).__name__}): {why}"
            warn(f"{what}; a resume reads the samples of its pass again", stacklevel=2)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where all ranks were at `state`."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continues where the ranks of a run, on any number of them, were at `states`."""
        lanes, found = states[0]["lanes"], getattr(self.dataset, "num_shards", 1)
        if lanes > 1 and found < lanes:
            raise ValueError(f"the checkpoint has read {self._name} in {lanes} parts, but it has {found} shards")
        self._lanes = lanes
        self._positions = {lane: Position(**position) for state in states for lane, position in state["read"]}
        # One state is that of a loader restored by itself; one per rank means that no lane has changed its rank.
        # By lanes: with a user's mpu, there are more states than data-parallel ranks.
        own = {share.lane for share in self._shares()}
        turns = (each["turn"] for each in states if own.intersection(lane for lane, _ in each["read"]))
        same = states[0].get("ranks", len(states)) == self._world.data_size
        self._turn = next(turns, 0) if same else 0
        self._restored = True

    def describe_replay(self) -> str | None:
        """Says how many samples are read again before the first batch, if any."""
        again = self._count_replay()
        if not again:
            return None
        kind, known = type(self.dataset).__name__, has_state(self.dataset)
        why = "the checkpoint does not contain its state" if known else "it has no state_dict and load_state_dict"
        return f"reading {again:,} samples of {self._name} ({kind}) again, because {why}"

    def _count_replay(self) -> int:
        if not self._restored:
            return self._start
        own = (self._positions.get(share.lane, Position()) for share in self._shares())
        return sum(position.samples for position in own if position.state is None and position.before is None)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(once=False)

    def iterate_epoch(self, number: int, batches: int | None) -> Iterator[Any]:
        """This rank's batches of one pass: equally many on all ranks."""
        self._lanes, self._positions, self._turn = 1, {0: Position(passes=number)}, 0
        return self._iterate(once=True)

    def _begin_replay(self, shares: Sequence[Share], skipped: int) -> Replay | None:
        """The count of the samples that are read again, if there are any. skipped: the batches that this process drops,
        if there are no positions."""
        if skipped:
            return Replay(skipped * self._micro_batch * self._world.data_size, self._name, self.say)
        workers = max(1, self._options["num_workers"])
        # Worker processes whose lanes are the same read the same samples; see `_Reader`.
        copies = workers // math.gcd(len(shares), workers)
        again = self._count_replay()
        return Replay(again, self._name, self.say, readers=workers, copies=copies) if again else None

    def _shares(self) -> list[Share]:
        return divide_lanes(self._lanes, self._world.data_rank, self._world.data_size)

    def _iterate(self, *, once: bool) -> Iterator[Any]:
        read = self._start // (self._micro_batch * self._world.data_size)  # batches of this rank, in the whole run
        skipped = 0
        if not self._restored and not once and read:
            # The run has begun with a version that stored no position, and read everything in one lane.
            self._lanes, skipped, read = 1, read, 0
        shares = self._shares()
        replay = None if once else self._begin_replay(shares, skipped)
        reader = _Reader(
            self._samples,
            shares,
            lanes=self._lanes,
            positions=self._positions,
            turn=self._turn,
            shuffling=self._shuffling,
            micro_batch=self._micro_batch,
            once=once,
            again=None if skipped or replay is None else replay.shared,
        )
        loader = DataLoader(reader, batch_size=None, collate_fn=keep, **self._options)
        for batch, lane, position in raise_failures(loader if replay is None else replay.follow(loader), self._name):
            before = self._positions.get(lane, Position())
            # Only then do the ranks have to agree on where a pass ends.
            if self._lanes == 1 and position.passes > before.passes:
                self.passes.end(read)
            self._positions[lane], self._turn = position, (self._turn + 1) % len(shares)
            read += 1
            if skipped and replay is not None:
                skipped -= 1
                replay.add(self._micro_batch * self._world.data_size)
                continue
            yield batch
        self.passes.end(read)


def _stand_in(value: Any) -> Any:
    """What a value counts as in the size of a state. Checkpoints hold more types than JSON does, but no nested
    tensors."""
    if isinstance(value, Tensor):
        raise TypeError("it contains a tensor")
    return value.tolist() if hasattr(value, "tolist") else str(value)


class _Reader(IterableDataset[Any]):
    """Yields a rank's batches, each with its lane and the lane's position behind it. In a worker process, only those
    that are the worker's: every workers-th.

    The position comes with the batch because workers read ahead.
    """

    def __init__(
        self,
        samples: Samples,
        shares: Sequence[Share],
        *,
        lanes: int,
        positions: Mapping[int, Position],
        turn: int,
        shuffling: Mapping[str, int],
        micro_batch: int,
        once: bool,
        again: Tensor | None,
    ) -> None:
        self._samples, self._shares, self._turn = samples, shares, turn
        self._lanes, self._positions, self._shuffling = lanes, dict(positions), shuffling
        self._micro_batch, self._once, self._again = micro_batch, once, again

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        shares, samples = self._shares, self._samples
        again = self._again.numpy()[number : number + 1] if self._again is not None else None
        begun = [self._positions.get(share.lane, Position()) for share in shares]
        lanes = [
            Lane(samples.dataset, share.lane, self._lanes, position, samples.name, again=again, **self._shuffling)
            for share, position in zip(shares, begun, strict=True)
        ]
        # With as many lanes as workers, a worker never needs those of the others.
        common = math.gcd(len(shares), workers)
        for turn in count():
            if (turn - number) % common:
                continue
            place = (self._turn + turn) % len(shares)
            # Read the round even if another worker yields it: only reading moves on in the lane.
            try:
                items = self._read_round(lanes[place], shares[place])
                if items is None:
                    return
                if turn % workers == number:
                    # The ranks that share the lane take turns within a round: samples own, own + ranks, own + 2 x
                    # ranks, ...
                    own = items[shares[place].own :: shares[place].ranks]
                    batch = samples.collate([sample for _, sample in own], [index for index, _ in own])
                    yield batch, shares[place].lane, lanes[place].position
            except DsjobError as error:
                yield pack_failure(error)

    def _read_round(self, lane: Lane, share: Share) -> list[Any] | None:
        """The samples of the next round. None at the end of the pass, if there is only one. Raises DataError."""
        size = share.ranks * self._micro_batch
        for _ in range(2):  # in this pass, else in the next
            items = lane.read(size)
            for item in items:
                if isinstance(item, FailedBatch):
                    raise item.error
            if len(items) == size:
                return items
            # The samples at the end of a pass that do not fill a round are dropped.
            if self._once and lane.samples >= size:
                return None
            lane.end_pass()
        name, kind = self._samples.name, type(self._samples.dataset).__name__
        part = "" if self._lanes == 1 else f" from part {share.lane} of {self._lanes}"
        raise DataError(f"{name} ({kind}) yields no full batch{part}: {size} samples are needed")
