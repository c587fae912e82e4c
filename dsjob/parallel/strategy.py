"""The protocol between the engine and the strategies that spread a model over ranks.

`reduce_gradients` allows any order of calls at every stage. It reduces what no backward pass has reduced: under
`no_sync`, if a program moves the boundary between forward and backward, or after two backward passes in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dsjob.compute.autocast import cast_operators, find_safe_modules, mark
from dsjob.compute.parts import Parts
from dsjob.compute.precision import Precision
from dsjob.optim import on_disk
from dsjob.optim.host import get_factor, prefers_kernels, set_factor, take_step
from dsjob.optim.on_disk import StateOnDisk
from dsjob.optim.onebit.own_gradients import unite_norms
from dsjob.optim.parts import split
from dsjob.optim.shards import local
from dsjob.parallel.held_sums import HeldSums
from dsjob.parallel.masters import Masters
from dsjob.parallel.norms import divide, multiply, total_norm
from dsjob.parallel.partial_sums import Partial, add_partial
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import find_counted_elsewhere
from dsjob.ranks.splits import Split
from dsjob.torch_private import change_tensors

_SENT_AT_ONCE = 64 << 20  # bytes
_SENT_ALONE = 1 << 20

Disk = StateOnDisk | None  # keeps the state of masters on the host, and those in `copies`, between steps


class Elsewhere:
    """Stands for outputs of the model that are on another rank: that of the last stage of a pipeline."""

    def __repr__(self) -> str:
        return "ELSEWHERE"


ELSEWHERE = Elsewhere()


class Pipeline(Protocol):
    """What runs the passes of a strategy whose module is a stage of a model (see `parallel.pipeline`).

    sizes: the number of elements of the whole model, and of the trained ones.
    """

    sizes: tuple[int, int]

    def forward(self, strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One forward pass without gradients: the model's output on the last stage, `ELSEWHERE` on the others."""

    def as_whole(self, strategy: Strategy) -> nn.Module:
        """What computes as the whole model when it is called, on all stages (see `parallel.pipeline.as_whole`)."""

    def begin_step(self, micro_steps: int) -> None:
        """Is called before each step, with the number of micro steps that the model was trained on before."""

    def run_step(
        self, strategy: Strategy, micro_batches: Sequence[MicroBatch], loss: Callable[[Any, Any], Tensor]
    ) -> list[Tensor]:
        """See `Strategy.run_step`."""

    def add_tied_gradients(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Adds up the gradients of parameters that several stages have."""


class MicroBatch(NamedTuple):
    """What the model is called with in one micro step, and what its loss is computed from besides the outputs."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any = None


class Strategy:
    """One model on the ranks of a job. The engine calls, in this order:

    1. the constructor, which shards, wraps or casts `module` in place
    2. `masters`, to build the optimizer over: fp32 weights by name, tied ones once, frozen ones left out
    for each micro step
    3. `start_micro_step(boundary, sync)` before a forward pass that will be differentiated
    4. `forward(...)`, then the loss's own backward; several times perhaps; at the boundary `end_backward()`
       (or `run_step(...)`, which does 3 and 4 for all micro steps of an optimizer step)
    at the boundary
    5. `reduce_gradients()`: reduces what backward passes have not; then `finish_gradients()`: the masters' `.grad` is
       the mean over all ranks (each rank's own if the optimizer `wants_own_gradients`)
    6. `clip(...)`, then `step(optimizer)` (skipped if the norm is not finite; gradients are then dropped)
    7. `finish_step()`
    and around checkpoints
    8. `weights()` to save from and load into in place, then `drop_gradients()` and `finish_step()` after loading
    """

    module: nn.Module
    masters: dict[str, nn.Parameter]
    autocast: torch.dtype | None  # the dtype of operators in forward passes; None: that of their operands
    copies: Masters | None = None  # if masters are not parameters of the model
    disk: Disk = None
    optimizer: Optimizer | None = None  # the engine's; None until it is built
    averages: Mapping[str, Tensor] = MappingProxyType({})  # of masters by name, saved in checkpoints
    pipeline: Pipeline | None = None  # what runs the passes if `module` is only a stage of the model
    # The engine calls it with the names of masters whose gradients are not finite, and skips the step, also in fp32.
    guard: Callable[[list[str]], None] | None = None
    splits: Mapping[str, Split] = MappingProxyType({})  # by name: parameters of which each tensor rank has a part
    partial: Partial = ()  # parameters whose gradients other ranks than data-parallel ones add up
    held: HeldSums | None = None  # gradients of earlier micro steps, if they are kept in another dtype
    gradient_factor: int = 1  # a step multiplies reduced gradients by it: the number of ranks to get their sum

    def __init__(self, model: nn.Module, world: World, precision: Precision, disk: Disk) -> None:
        self.world, self.disk = world, disk
        self.autocast = precision.autocast
        self._counted_elsewhere = find_counted_elsewhere(model, world)  # by name, since sharding replaces parameters

    @cached_property
    def parts(self) -> Parts:
        """The parts of the steps of this model, for callbacks to watch."""
        return Parts()

    def start_micro_step(self, boundary: bool, sync: bool = True) -> None:
        """Prepares for a forward and backward pass. boundary: the optimizer steps after it.

        Without `sync`, its gradients stay on their rank, and are reduced later, or by `reduce_gradients`.
        """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; in a pipeline, `ELSEWHERE` on all stages but the last. Under autocast, operators compute
        in its dtype."""
        if self.pipeline is not None:
            return self.pipeline.forward(self, args, kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The output of `module`, which in a pipeline is only a stage of the model."""
        with cast_operators(self.world.device, self.autocast):
            return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def count(self, counted: Callable[[str], bool] = lambda name: True) -> tuple[int, int]:
        """The number of elements of all parameters of `module` whose names are `counted` (tied ones once), and of the
        trained ones. Parameters that tensor ranks divide count as a whole."""

        def add(tensors: Mapping[str, Tensor]) -> int:
            given = {name: tensor.shape for name, tensor in tensors.items() if counted(name)}
            return sum((self.splits[n].shape(s) if n in self.splits else s).numel() for n, s in given.items())

        return add(self.weights()), add(self.masters)

    def run_step(self, micro_batches: Sequence[MicroBatch], loss: Callable[[Any, Any], Tensor]) -> list[Tensor]:
        """Runs all forward and backward passes of one optimizer step: calls 3 and 4 of every micro step.

        A pipeline interleaves the passes of its stages. A collective.

        micro_batches: this rank's, one per micro step, in the order of the data, with their tensors on the device. All
        ranks have the same number.
        loss(outputs, target): a scalar to back-propagate, already divided by the number of micro batches, and scaled in
        fp16. It is called once per micro batch, in order, on the ranks that have the model's outputs. Its errors pass
        through.

        Returns what `loss` returned, in order: detached scalars on the device, the same on all ranks that hold one
        model together.
        """
        if self.pipeline is not None:
            return self.pipeline.run_step(self, micro_batches, loss)
        losses = []
        for number, (args, kwargs, target) in enumerate(micro_batches, 1):
            # Before the forward pass, since DDP decides there whether the following backward pass reduces.
            self.start_micro_step(number == len(micro_batches))
            value = loss(self.forward(*args, **kwargs), target)
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(value.detach())
        self.end_backward()
        return losses

    def reduce_gradients(self) -> None:
        """Reduces gradients that backward passes have not reduced, if there are any. A collective."""

    def end_backward(self) -> None:
        """Called after the engine's backward pass at the boundary. Reduces what that pass could not. A collective."""

    def own_gradient(self, name: str) -> Tensor | None:
        """A parameter's unreduced gradient on this rank; None if there is none, or if `.grad` contains it."""
        return None

    def find_unused(self) -> Collection[str]:
        """Names of masters whose gradients are zero only because no rank has used their parameters in this step."""
        return ()

    def end_micro_step(self) -> None:
        """Called after the backward passes of a micro step before the boundary."""
        if self.held is not None:
            if self.copies is not None:
                self.copies.take_gradients()
            self.held.hold(self.masters)

    def finish_gradients(self) -> None:
        """Called after all backward passes of a step: moves the gradients to the masters. A collective in a pipeline
        with tied layers, and with partial gradients."""
        if self.copies is not None:
            self.copies.take_gradients()
        if self.held is not None:
            self.held.give(self.masters)
        for name in self.find_unused():
            self.masters[name].grad = None
        if self.pipeline is not None:
            self.pipeline.add_tied_gradients(self.masters)
        add_partial(self.masters, self.partial, self.world.device)

    @torch.no_grad()
    def clip(self, max_norm: float, scale: float = 1.0, divisor: Tensor | None = None) -> Tensor:
        """Divides all gradients by `scale`, and by `divisor` (scalar), then clips them to `max_norm` if that is > 0.
        Where kernels step the optimizer, they do so as they read the gradients.

        Returns the L2 norm over all ranks (0-dim, after dividing, before clipping), including the parts of
        model-parallel ranks. It is the same on every rank, and not finite if any gradient is not finite. If the
        optimizer takes each rank's own gradients, each rank clips them by their own norm, and this returns
        `unite_norms` of these norms.
        """
        named = {name: p for name, p in self.masters.items() if p.grad is not None}
        gradients = [p.grad for p in named.values() if p.grad is not None]
        # Without offloading, nothing here waits for the device: the norm and the factor for clipping stay tensors.
        norm, kernels = self._measure(named), self.optimizer if prefers_kernels(self.optimizer) else None
        norm = norm if kernels is None else norm * get_factor(kernels)  # of an earlier call for this step
        norm = norm / scale if scale != 1.0 else norm
        norm = norm if divisor is None else norm / divisor.to(norm)
        bound = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else None
        if kernels is not None:
            by = scale if divisor is None else scale * float(divisor)
            set_factor(kernels, get_factor(kernels) / by * (1.0 if bound is None else float(bound)))
        elif gradients:
            if scale != 1.0:
                torch._foreach_div_(gradients, scale)
            if divisor is not None:
                divide(gradients, divisor)
            if bound is not None:
                multiply(gradients, bound)
        return unite_norms(self.optimizer, norm, self.world.device)

    def _measure(self, named: Mapping[str, nn.Parameter]) -> Tensor:
        """The L2 norm of the gradients of parameters."""
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        device = self.world.device
        norm = total_norm([g for name, g in gradients.items() if name not in self._counted_elsewhere], device)
        if self.world.model.size > 1:
            # In fp32, the square of a norm above 1.8e19 would be infinite, and the step would be skipped.
            square = norm.to(device, torch.float64).square()
            others = [g for name, g in gradients.items() if name in self._counted_elsewhere]
            # Parameters counted on another rank add nothing, but if their gradients are not finite, all ranks must know
            # it: 0 * inf is nan.
            if others:
                square += 0 * total_norm(others, device).to(square)
            # Each rank adds the squares of its own parts of the model.
            dist.all_reduce(square, group=self.world.model.group)
            norm = square.sqrt().float().to(norm.device)
        return norm

    def step(self, optimizer: Optimizer) -> None:
        """Steps the optimizer. Copies of new weights to the model may still be running when this returns."""
        if self.copies is not None:
            self.copies.step(optimizer)
        elif self.disk is not None:
            masters = [m for m in self.masters.values() if m.grad is not None and m.device.type == "cpu"]
            parts = list(split(masters, lambda master: local(master).nbytes, on_disk.PART))
            self.disk.step(optimizer, parts, take_step, lambda _: None)
        else:
            take_step(optimizer)

    def find_non_finite(self) -> list[str]:
        """Names of masters whose gradients (under sharding, this rank's part of them) are not finite."""
        return [
            name
            for name, master in self.masters.items()
            if master.grad is not None and not bool(torch.isfinite(local(master.grad)).all())
        ]

    def finish_step(self) -> None:
        """Called after a step, or a skipped one: drops gradients, and copies new weights to the model."""
        if prefers_kernels(self.optimizer):
            set_factor(self.optimizer, 1.0)
        for master in self.masters.values():
            master.grad = None  # also for masters that the optimizer does not have
        if self.copies is not None:
            self.copies.give_weights()

    def drop_gradients(self) -> None:
        """Drops all gradients of a step that will not be finished."""
        if self.held is not None:
            self.held.drop()
        self.module.zero_grad(set_to_none=True)
        for master in self.masters.values():
            master.grad = None
        if self.copies is not None:
            self.copies.drop_gradients()

    def free_gathered(self) -> None:
        """Frees gathered parameters."""

    def keep_gathered(self) -> None:
        """From now on, keeps parameters whole between steps, so that one rank alone may call the model or read its
        state. A collective. Does nothing at stage 3, where they are gathered for each use."""

    def close(self) -> None:
        """Called when there will be no more passes."""
        self.drop_gradients()

    def move_weights(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces every parameter, gradient, buffer and master by `move(tensor)`."""
        change_tensors(self.module, move)
        if self.copies is not None:
            self.copies.move(move)

    def shown(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by which a program may refer to a parameter, with its name: the model's, and the optimizer's."""
        yield from self.module.named_parameters()
        yield from self.masters.items()

    def weights_changed(self) -> None:
        """Call it after writing into `weights()`: updates everything derived from them."""
        self.free_gathered()
        if self.copies is not None:
            self.copies.forget_sent()
            self.copies.give_weights()

    def weights(self) -> dict[str, Tensor]:
        """Parameters by name, tied ones once: the masters, and the model's frozen parameters."""
        frozen = {n: p.data for n, p in self.module.named_parameters() if n not in self.masters}
        return {**{name: master.data for name, master in self.masters.items()}, **frozen}


@torch.no_grad()
def broadcast(tensors: list[Tensor], world: World) -> None:
    """Overwrites tensors on `world.device` with the first data-parallel rank's. Small ones are sent in one message."""
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        # Copying a large tensor into a buffer and back would need memory, and take longer than a message.
        if tensor.nbytes >= _SENT_ALONE and tensor.is_contiguous():
            dist.broadcast(tensor, group=world.data_group, group_src=0)
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for same in together.values():
        # [all elements], one dtype: a collective per bias or norm would cost more than these two copies.
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, group=world.data_group, group_src=0)
        parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [part.view_as(tensor) for part, tensor in zip(parts, same, strict=True)])


@torch.no_grad()
def align(model: nn.Module, world: World, but: Collection[int] = ()) -> None:
    """Broadcasts the first data-parallel rank's parameters and buffers. Otherwise, ranks would train different
    models. but: ids of parameters that differ on purpose."""
    found = (each for each in chain(model.parameters(), model.buffers()) if id(each) not in but)
    there = [each.data for each in found if not each.is_meta]  # see presharded
    waiting, size = list[Tensor](), 0
    for tensor in filter(Tensor.numel, there):
        waiting.append(tensor)
        size += tensor.nbytes
        if size >= _SENT_AT_ONCE:
            _send(waiting, world)
            waiting, size = [], 0
    _send(waiting, world)


def _send(tensors: list[Tensor], world: World) -> None:
    """Broadcasts the first rank's values into tensors, which may be on the host and have any layout."""
    sent = [tensor.to(world.device).contiguous() for tensor in tensors]
    if sent:
        broadcast(sent, world)
    for tensor, values in zip(tensors, sent, strict=True):
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


def mark_safe(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """With autocast, marks the parameters whose gradients are communicated in lower precision. Returns their
    modules."""
    if precision.autocast is None:
        return []
    modules = [module for module in find_safe_modules(model, precision.safe) if module is not model]
    for module in modules:
        for parameter in module.parameters(recurse=False):
            mark(parameter, precision.autocast)
    return modules


def widen(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Casts parameters to the dtype of masters, in place. In half precision, they lose small optimizer updates."""
    known = (torch.bfloat16, torch.float16, *((torch.float32,) if dtype != torch.float32 else ()))
    for parameter in model.parameters():
        if parameter.dtype in known:
            parameter.data = parameter.data.to(dtype)
