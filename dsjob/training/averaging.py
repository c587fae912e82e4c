"""The mean of a step: how much each micro batch counts in it, by its targets over all micro steps and ranks.

An engine averages the losses of micro batches, each a mean over the targets of its own. A loss that is multiplied by
its targets x micro batches / targets of the step makes that the mean over all targets. Counts are taken where the
labels are, on the host as a rule; the sum over ranks is on its way while the first micro batch is computed.

Equal counts give a factor of exactly 1, so no bit changes. Programs that call `engine.backward`, `trainer.step`, and
`engine: deepspeed` average micro batches alike, as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.compute.calls import Loss
from dsjob.data.batches import count_targets
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError, DataError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World

_OFF = "set trainer.loss_average=batches to average per-batch means"


class Averaging:
    """How steps are averaged: by targets where batches have labels, unless `by_targets` is false; else alike.

    `shifts`: whether the model shifts labels, see `count_targets`.
    """

    def __init__(self, world: World | None = None, *, by_targets: bool = False, shifts: bool = False) -> None:
        self._world, self.by_targets, self._shifts = world, by_targets, shifts
        self._labelled: bool | None = None if by_targets else False

    def count(self, batch: Any) -> Tensor | int | None:
        """The targets of a batch; None where it does not count by them. A tensor where only the device knows."""
        return count_targets(batch, shifted=self._shifts) if self.by_targets else None

    def measure(self, loss: Loss, batch: Any, samples: int) -> Tensor | int:
        """What the mean of an evaluation batch of `samples` weighs: what its loss says, its targets, or its samples."""
        if loss.count is not None and self.by_targets:
            return loss.count
        targets = self.count(batch)
        return samples if targets is None else targets

    def read(self, batches: Iterator[Any], micro_steps: int) -> Iterator[tuple[Any, Part]]:
        """The micro batches of one step, each with its part in it. All ranks that train on other data read together.

        Where targets count, all of them are read before the first is given out. Raises DataError for a step without
        targets, ContractError where some batches have labels and others have none.
        """
        # Only the first batch can tell whether there are labels; all ranks have to agree on it before they communicate.
        first = next(batches)
        if self._labelled is None:
            self._labelled = self._agree(self.count(first) is not None)
        if not self._labelled:
            step = Step(self._world, micro_steps, sums=self.by_targets)
            yield first, Part(step)
            for batch in islice(batches, micro_steps - 1):
                yield batch, Part(step)
            return
        # All micro batches of the step are needed before the first one: each weight contains the sum over the step.
        read = [first, *islice(batches, micro_steps - 1)]
        counts = [self._require_count(batch) for batch in read]
        step = Step(self._world, micro_steps, targets=sum(counts), sums=True)
        # pop, so that a micro batch is freed once it is used.
        for count in counts:
            yield read.pop(0), Part(step, count)

    def _require_count(self, batch: Any) -> Tensor | int:
        count = self.count(batch)
        if count is None:
            raise ContractError("a batch has no `labels`, as the first one of this run had", hint=_OFF)
        return count

    def _agree(self, labelled: bool) -> bool:
        world = self._world
        if world is None or world.data_size == 1:
            return labelled
        found = all_gather(world.data, labelled)
        if any(found) and not all(found):
            raise ContractError(
                f"the first batch has no `labels` on data-parallel rank {found.index(False)}, and has them on others",
                hint=_OFF,
            )
        return labelled


class Step:
    """One optimizer step: the mean over `micro_steps` micro batches of each rank.

    `targets`: those of this rank, where they count. `sums`: whether losses that are sums count by what they say.
    """

    def __init__(
        self, world: World | None, micro_steps: int, *, targets: Tensor | int | None = None, sums: bool = False
    ) -> None:
        self._group = world.data_group if world is not None else None
        self._ranks = world.data_size if world is not None else 1
        self._batches, self._sums = micro_steps * self._ranks, sums
        self._said: Tensor | None = None  # what losses that are sums say they are of
        self._reduction: Any = None
        self._total: Tensor | int | None = targets
        if world is not None and self._ranks > 1 and targets is not None:
            if isinstance(targets, Tensor):
                self._total = targets.to(world.device, copy=True)
            else:
                self._total = torch.full((), targets, dtype=torch.int64, device=world.device)
            # Asynchronous: the sum travels during the first forward pass; `_expect` waits for it before the first
            # backward.
            self._reduction = dist.all_reduce(self._total, group=world.data_group, async_op=True)

    def weigh(self, loss: Loss, targets: Tensor | int | None) -> Tensor:
        """What to go back from: the loss of a micro batch as the engine's mean takes it."""
        if loss.count is not None and self._sums:
            # Known only after the last forward pass, so `settle` corrects the gradients by said / expected before the
            # step.
            self._said = loss.count if self._said is None else self._said + loss.count
            return loss.value * _as(self._batches / self._expect(), loss.value)
        if targets is None:
            return loss.mean
        # The engine divides by `_batches` (micro steps x ranks). What is left for each target is 1 / targets of the
        # step.
        return loss.mean * _as(targets * self._batches / self._expect(), loss.value)

    def settle(self, engine: Engine) -> None:
        """Before the step: gradients of losses that are sums are divided by what these say, over all ranks."""
        if self._said is None:
            return
        if self._ranks > 1:
            dist.all_reduce(self._said, group=self._group)
        engine.divide_gradients(self._said / self._expect())

    def finish(self, loss: Tensor) -> Tensor:
        """The step's loss on this rank, from the mean of what `Part.tell` gave."""
        return loss if self._said is None else loss / _as(self._said / self._expect(), loss)

    def _expect(self) -> Tensor | float:
        """The targets of the step on all ranks, as far as known before it; where none count, its micro batches."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        if isinstance(self._total, Tensor):
            self._total = self._total.double()
        if self._total is None:
            return self._batches
        known = isinstance(self._total, int) or self._total.device.type == "cpu"  # elsewhere, to look would be to wait
        if known and not self._total:
            raise DataError(
                "a whole step has no targets: all labels of its micro batches are -100",
                hint="are samples cut off before their answers begin? Leave such samples out of data.train",
            )
        return self._total


class Part:
    """A micro batch's part in its step. `targets`: how many it has, where they count."""

    def __init__(self, step: Step, targets: Tensor | int | None = None) -> None:
        self.step, self._targets = step, targets

    def weigh(self, loss: Loss) -> Tensor:
        """See `Step.weigh`."""
        return self.step.weigh(loss, self._targets)

    def tell(self, weighed: Tensor) -> Tensor:
        """What `weigh` gave, detached; zero of a micro batch without targets, whose mean is not a number."""
        if isinstance(self._targets, Tensor):
            return torch.where(self._targets == 0, torch.zeros_like(weighed), weighed.detach())
        return torch.zeros_like(weighed) if self._targets == 0 else weighed.detach()


def _as(weight: Tensor | float, loss: Tensor) -> Tensor | float:
    return weight.to(loss.dtype) if isinstance(weight, Tensor) else weight
