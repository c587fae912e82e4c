"""Averages a step's loss over all its targets, across micro batches and ranks.

The loss of a micro batch is a mean over its own targets, and the engine averages these means with equal weight. To get
the mean over all targets, each loss is multiplied by (its targets) x (micro batches) / (targets of the step). Targets
are counted where the labels are, usually on the host. The sum over ranks is reduced while the first micro batch runs.

Each of several losses is averaged by its own targets. If all counts are equal, the factor is exactly 1, so no bit
changes. Programs that call `engine.backward`, `trainer.step`, and `engine: deepspeed` average micro batches with equal
weight, as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.compute.calls import Loss
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError, DataError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.training.objective import Count, Objective

Counts = Sequence[Count]  # one for each loss

_OFF = "set trainer.loss_average=batches to average per-batch means"


class Averaging:
    """Averages steps by targets if batches have labels and `by_targets` is true; otherwise with equal weights.

    objective: counts the targets of each loss.
    """

    def __init__(
        self, world: World | None = None, *, by_targets: bool = False, objective: Objective | None = None
    ) -> None:
        self._world, self.by_targets, self._objective = world, by_targets, objective or Objective()
        self._labelled: bool | None = None if by_targets else False

    def count(self, batch: Any) -> Counts | None:
        """The targets of a batch for each loss; None if they do not count. Tensors if the labels are on a GPU."""
        return self._objective.count(batch) if self.by_targets else None

    def measure(self, losses: Sequence[Loss], batch: Any, samples: int) -> Counts:
        """The weights of an evaluation batch, one for each loss: the count that the loss returned, its targets, or its
        samples."""
        targets = self.count(batch) or [samples] * len(losses)
        return [
            loss.count if loss.count is not None and self.by_targets else count
            for loss, count in zip(losses, targets, strict=True)
        ]

    def read(self, batches: Iterator[Any], micro_steps: int) -> Iterator[tuple[Any, Part]]:
        """Yields the micro batches of one step, each with its Part. A collective of the data-parallel ranks.

        If targets count, it reads all micro batches before it yields the first. Raises DataError for a step without
        targets, ContractError if only some batches have labels.
        """
        # The first batch shows whether there are labels. All ranks must agree on it, or only some would start the
        # all-reduce below.
        first = next(batches)
        if self._labelled is None:
            self._labelled = self._agree(self.count(first) is not None)
        if not self._labelled:
            step = Step(self._world, micro_steps, sums=self.by_targets)
            yield first, Part(step)
            for batch in islice(batches, micro_steps - 1):
                yield batch, Part(step)
            return
        # Read all micro batches of the step first: each weight contains the sum over the step.
        read = [first, *islice(batches, micro_steps - 1)]
        counts = [self._require_count(batch) for batch in read]
        step = Step(self._world, micro_steps, targets=[sum(each) for each in zip(*counts, strict=True)], sums=True)
        # pop, so that a micro batch is freed once it is used.
        for count in counts:
            yield read.pop(0), Part(step, count)

    def _require_count(self, batch: Any) -> Counts:
        count = self.count(batch)
        if count is None:
            raise ContractError("a batch has no `labels`, but the first batch of this run had them", hint=_OFF)
        return count

    def _agree(self, labelled: bool) -> bool:
        world = self._world
        if world is None or world.data_size == 1:
            return labelled
        found = all_gather(world.data, labelled)
        if any(found) and not all(found):
            raise ContractError(
                f"the first batch has no `labels` on data-parallel rank {found.index(False)}, but has them on others",
                hint=_OFF,
            )
        return labelled


class Step:
    """One optimizer step: the mean over `micro_steps` micro batches of each rank.

    targets: of this rank for each loss, if they count. sums: whether a loss function that returns (sum, count) is
    averaged by its counts.
    """

    def __init__(
        self, world: World | None, micro_steps: int, *, targets: Counts | None = None, sums: bool = False
    ) -> None:
        self._group = world.data_group if world is not None else None
        self._ranks = world.data_size if world is not None else 1
        self._batches, self._sums = micro_steps * self._ranks, sums
        self._counted: Tensor | None = None  # the sum of the counts that a loss function returned
        self._reduction: Any = None
        self._totals: Sequence[Count] | Tensor | None = targets
        if world is not None and self._ranks > 1 and targets is not None:
            # int64 [losses]
            self._totals = torch.stack([_to_device(each, world.device) for each in targets])
            # Asynchronous, so that it overlaps with the first forward pass. `_expect` waits for it before the first
            # backward pass.
            self._reduction = dist.all_reduce(self._totals, group=world.data_group, async_op=True)

    def weigh(self, losses: Sequence[Loss], targets: Counts | None) -> list[Tensor]:
        """The losses, weighted so that the engine's mean over micro batches is the mean of the step."""
        if len(losses) == 1 and losses[0].count is not None and self._sums:
            loss, count = losses[0], losses[0].count
            # The total of the counts is known only after the last forward pass. Until then, use the expected number of
            # targets; `settle` corrects the gradients before the optimizer steps.
            self._counted = count if self._counted is None else self._counted + count
            return [loss.value * _as(self._batches / self._expect(0), loss.value)]
        if targets is None:
            return [loss.mean for loss in losses]
        # The engine divides by `_batches` (micro steps x ranks), so each target's weight is 1 / targets of the step.
        return [
            _mask(loss.mean * _as(count * self._batches / self._expect(number), loss.value), count)
            for number, (loss, count) in enumerate(zip(losses, targets, strict=True))
        ]

    def settle(self, engine: Engine) -> None:
        """Call it before the step. Corrects the gradients if a loss function returned counts; a collective then."""
        by = self.find_correction()
        if by is not None:
            engine.divide_gradients(by)

    def find_correction(self) -> Tensor | None:
        """What to divide the gradients by, float64 []; None if no loss function returned counts. A collective then."""
        if self._counted is None:
            return None
        # float64 []: the sum over all ranks. Every rank reaches this, since all ranks use the same loss function.
        if self._ranks > 1:
            # Summed over ranks in place: `finish` reads the same tensor afterwards.
            dist.all_reduce(self._counted, group=self._group)
        # Losses were divided by the expected number of targets. This corrects them to the number that was returned.
        return self._counted / self._expect(0)

    def finish(self, loss: Tensor) -> Tensor:
        """The step's loss on this rank, from the mean of the results of `Part.detach`."""
        return loss if self._counted is None else loss / _as(self._counted / self._expect(0), loss)

    def _expect(self, number: int) -> Tensor | float:
        """The targets of a loss in the step on all ranks; if they do not count, the micro batches of the step."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        if self._totals is None:
            return self._batches
        several, total = len(self._totals) > 1, self._totals[number]
        if isinstance(total, Tensor) and total.device.type != "cpu":  # checking it would wait for the device
            # fp32 would round counts above 2^24.
            return total.double().clamp(min=1) if several else total.double()
        if total == 0 and (not several or not any(int(each) for each in self._totals)):
            raise DataError(
                "a step has no targets: all labels in its micro batches are -100",
                hint="maybe samples are truncated before their answers begin; remove such samples from data.train",
            )
        # One of several losses may have no target in a step: it adds nothing.
        return max(int(total), 1) if not isinstance(total, Tensor) else total.double().clamp(min=1)


class Part:
    """A micro batch's part in its step. targets: how many it has for each loss, if they count."""

    def __init__(self, step: Step, targets: Counts | None = None) -> None:
        self.step, self._targets = step, targets

    def weigh(self, losses: Sequence[Loss]) -> list[Tensor]:
        """See `Step.weigh`."""
        return self.step.weigh(losses, self._targets)

    def weigh_mean(self, loss: Tensor) -> Tensor:
        """`weigh` for the only loss, the mean over the targets of the micro batch."""
        return self.weigh([Loss(loss.reshape(()))])[0]


def _mask(loss: Tensor, count: Count) -> Tensor:
    """The loss; zero, still part of the graph, for a micro batch without targets, whose mean is NaN."""
    if isinstance(count, int):
        return loss if count else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
    return torch.where(count == 0, 0.0, loss)


def _to_device(count: Count, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device)
    return torch.full((), count, dtype=torch.int64, device=device)


def _as(weight: Tensor | float, loss: Tensor) -> Tensor | float:
    return weight.to(loss.dtype) if isinstance(weight, Tensor) else weight
