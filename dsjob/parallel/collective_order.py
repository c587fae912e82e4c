"""One order of FSDP2's collectives on all ranks, whatever parts of the model each rank uses.

By itself, FSDP2 gathers a unit when a pass enters it, and reduces the gradients that a rank has as soon as they are
complete. If ranks use different parts (experts, branches, a block that one of them leaves out), their collectives would
pair up wrongly. Here, collectives start in a fixed order, as in DDP. A rank that has not used a parameter contributes a
gradient of zero. A parameter that no rank has used gets no gradient, as on one process.

At stage 3, each use of a unit gathers it, so ranks must enter the same units in the same order. Inside a unit, they may
use different parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dsjob.parallel.gather_check import DIGEST, GatherCheck
from dsjob.ranks.mesh import World
from dsjob.torch_private.fsdp import UnitPasses, observe_passes


class CollectiveOrder:
    """The order of a model's collectives, and which parameters a step has used.

    Reductions are in the order of the first rank's backward pass in the first step; before that is known, in the
    reverse order of the units' definitions. Gathers are in the reverse order of reductions.

    has_unreduced: whether there may be gradients that no backward pass has reduced.
    """

    def __init__(
        self, units: Sequence[FSDPModule], names: Mapping[Any, str], world: World, *, orders_gathers: bool
    ) -> None:
        """units: the root first. names: of their FSDPParams. orders_gathers: each unit is gathered once a step, as at
        stages 1 and 2, so that gathers can have an order."""
        self._world, self._names, self._orders_gathers = world, names, orders_gathers
        self._units = observe_passes(units, self)
        self._order = list(reversed(range(len(self._units))))  # of reductions
        self._observed = self._order  # the order of this rank's last backward pass
        self._is_learned = len(self._units) < 2
        # uint8 [parameters]: what ranks agree on if each has used all of them
        self._ones = torch.ones(len(names), dtype=torch.uint8, device=world.device)
        root = cast(nn.Module, units[0])
        checks = not orders_gathers and world.data_size > 1
        self._check = GatherCheck(world, _name_units(root, self._units)) if checks else None
        if orders_gathers:
            root.register_forward_hook(torch.compiler.disable(lambda *_: self._gather_rest()))  # type: ignore[no-untyped-call]
        self.begin_step()

    def begin_step(self) -> None:
        """Called after a step, or when its gradients are dropped."""
        self.has_unreduced = False
        self._used = set[Any]()  # FSDPParams that have had a gradient on this rank
        self._agreement: tuple[Tensor, dist.Work, bool] | None = None
        self._expected = [0] * len(self._units)  # backward passes of each unit that are still to come
        self._entered = set[int]()  # units, since the last backward pass that has reduced
        self._begin_pass()
        self.forget_gathered()

    def _begin_pass(self) -> None:
        self._complete: list[int] = []  # units whose gradients are complete
        self._to_reduce = deque(self._order)
        self._repeats = False  # whether a unit got gradients after they had been reduced

    # --- gathers

    def forget_gathered(self) -> None:
        """Called when all units have been freed."""
        self._to_gather = deque(reversed(self._order) if self._orders_gathers else ())

    def on_gather(self, number: int) -> None:
        if self._check is not None:
            self._check.note(number)
        if number in self._to_gather:
            # Those before it first: other ranks may have entered them.
            while self._to_gather[0] != number:
                self._gather_next()
            self._to_gather.popleft()

    def _gather_rest(self) -> None:
        """Gathers the units that this rank has not entered: others may have."""
        while self._to_gather:
            self._gather_next()

    def _gather_next(self) -> None:
        unit = self._units[self._to_gather.popleft()]
        if not unit.gathered:
            unit.gather()

    # --- reductions

    def on_forward(self, number: int, *, differentiable: bool) -> None:
        self._entered.add(number)
        self._expected[number] += differentiable

    def on_backward(self, number: int) -> None:
        self._gather_rest()
        unit = self._units[number]
        self._expected[number] -= 1
        if self._expected[number] != 0 and self._orders_gathers:
            return  # it stays gathered for its other uses
        if not unit.reduces:
            unit.end()
            return
        if self._expected[number] == 0:
            self._complete.append(number)
        self._repeats |= number not in self._to_reduce
        if not self._to_reduce or self._to_reduce[0] != number or number not in self._complete:
            unit.end_without_reducing()  # until it is its turn
        while self._to_reduce and self._to_reduce[0] in self._complete:
            self._reduce_next()

    def on_backward_end(self) -> None:
        self._gather_rest()
        if not self._units:  # all parameters are whole on every rank
            return
        if self._units[0].reduces:
            self._observed = self._complete + [number for number in self._order if number not in self._complete]
            # Some are not complete: they were not used, or their inputs need no gradients.
            while self._to_reduce:
                self._reduce_next()
            self.has_unreduced = self._repeats
            self._entered.clear()
            self._begin_pass()
        else:
            self.has_unreduced = True
        if self._units[0].reshards:
            self.forget_gathered()

    def _reduce_next(self) -> None:
        number = self._to_reduce.popleft()
        unit = self._units[number]
        zeros = self._world.data_size > 1 and (self._orders_gathers or number in self._entered)
        self._used.update(unit.take_part(zeros=zeros))
        unit.end()

    # --- what all ranks have used

    def has_gradient(self, parameter: Any) -> None:
        """Notes that this rank has a gradient of an FSDPParam, which no backward pass has reduced."""
        self._used.add(parameter)

    def agree(self) -> None:
        """Begins to find out which parameters any rank has used in this step. A collective.

        The host does not wait for the device, except for the order, in the first step.
        """
        if self._world.data_size == 1 or not self._names:
            return
        if not self._is_learned:
            self._learn()
        used = [parameter in self._used or not parameter.sharded_param.requires_grad for parameter in self._names]
        flags = self._ones if all(used) else torch.tensor(used, dtype=torch.uint8, device=self._world.device)
        if self._check is not None:
            flags = torch.cat([self._check.digest(), flags])
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._world.data_group, async_op=True)
        self._agreement = flags, cast(dist.Work, work), all(used)

    def find_unused(self) -> set[str]:
        """The names of trained parameters that no rank has used in this step. If this rank has used all, it does not
        wait to find out.

        Raises UsageError if ranks have gathered different units.
        """
        if self._agreement is None:
            return set()
        flags, work, uses_all = self._agreement
        work.wait()
        if self._check is not None:
            self._check.compare(flags[:DIGEST])
            flags = flags[DIGEST:]
        if uses_all:
            return set()
        return {name for name, used in zip(self._names.values(), flags.tolist(), strict=True) if not used}

    def check(self) -> None:
        """Waits for the device to say whether ranks have gathered the same units until the last step. Raises UsageError
        if they have not."""
        if self._check is not None:
            self._check.check()

    def _learn(self) -> None:
        """Takes over the first rank's order."""
        order = torch.tensor(self._observed, device=self._world.device)
        dist.broadcast(order, group=self._world.data_group, group_src=0)
        self._order, self._is_learned = order.tolist(), True


def _name_units(root: nn.Module, units: Sequence[UnitPasses]) -> list[str]:
    """The names of the units' modules."""
    names = {module: name or "the root" for name, module in root.named_modules()}
    return [names[unit.module] for unit in units]
