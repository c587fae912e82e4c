"""ZeRO stages 1 to 3 on FSDP2: fp32 masters are sharded over the ranks, compute copies are gathered block by block.

0-dim and empty parameters stay whole on every rank (`unsharded`).

stage  gradients                                        parameters
1      kept whole while accumulating, reduce-scattered   gathered once a step
       at the boundary
2      reduce-scattered every micro step                 gathered once a step
3      reduce-scattered every micro step                 gathered for each use, block by block

MiCS uses a mesh with two axes: FSDP2 shards within a group, and all-reduces shards of gradients between groups. hpZ
uses `reshard_after_forward=n`: masters stay sharded over all ranks, and between forward and backward, a block's compute
copy stays sharded over n successive ranks. (DeepSpeed keeps that second copy all the time.) Ranks may use different
parameters (`collective_order`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor, Partial

from dsjob.compute.autocast import marked_dtype
from dsjob.compute.precision import Precision
from dsjob.contract.spec import Zero
from dsjob.errors import UsageError
from dsjob.optim.shards import local
from dsjob.parallel.buffers import SharedBuffers
from dsjob.parallel.collective_order import CollectiveOrder
from dsjob.parallel.gloo import exchange_directly
from dsjob.parallel.masters import Masters, choose_host, use_cores
from dsjob.parallel.pairs import HOST
from dsjob.parallel.partial_calls import allow_partial_calls
from dsjob.parallel.presharded import (
    ShardStatus,
    announce,
    is_unshardable,
    lay_aside,
    make_whole,
    require_shards,
    write_back,
)
from dsjob.parallel.shards_on_disk import ShardsOnDisk
from dsjob.parallel.statistics import keep_statistics_wide
from dsjob.parallel.strategy import Disk, Strategy, align, widen
from dsjob.parallel.units import shard
from dsjob.parallel.unsharded import Unsharded
from dsjob.parallel.whole_state import show_whole_state
from dsjob.ranks.mesh import World
from dsjob.torch_private import change_tensors
from dsjob.torch_private.fsdp import (
    begin_calls,
    drop_own_gradient,
    find_gathered,
    find_own_gradient,
    is_gathered,
    is_shown_whole,
    keep_gathered_in_state_dict,
    list_owners,
    list_sharded,
    look_again_at_dtypes,
    name_of,
)


class Sharded(Strategy):
    """Shards each repeated block of a model as one unit, and the rest of the model as another."""

    _on_disk: ShardsOnDisk | None = None

    def __init__(self, model: nn.Module, *, zero: Zero, world: World, precision: Precision, disk: Disk) -> None:
        _refuse_groups(zero, world)
        if zero.mics_shard_size > 0:
            # Each group of `mics_shard_size` ranks holds one whole copy of the state.
            world = dataclasses.replace(world, copies=world.data_size // zero.mics_shard_size)
        super().__init__(model, world, precision, disk)
        self._stage, self._keeps_gathered = zero.stage, False
        self._flags: tuple[bool, bool] | None = None
        self._reduce_dtype = precision.reduce
        # [shard], or with MiCS [replicate, shard]: FSDP2 shards over the last axis.
        mesh = self._mesh = world.data_mesh
        require_shards(model, world)
        if mesh.ndim > 1:
            make_whole(model)  # zero.Init sharded it over a different mesh
        # zero.Init's shards leave meta tensors behind, which fully_shard can take; write_back brings their values back.
        placed = lay_aside(model)
        # Before sharding: afterwards no rank has a whole tensor that could be compared or cast.
        align(model, world)
        widen(model, precision.master)
        left = _move_unshardable(model, world.device)
        keep_off = zero.offload_param if zero.offload == "param" else None
        pin = keep_off is not None and keep_off.pin_memory and world.device.type == "cuda"
        group = zero.zero_hpz_partition_size
        options: dict[str, Any] = {
            "mesh": mesh,
            "ignored_params": set(left.values()),
            "offload_policy": CPUOffloadPolicy(pin and not zero.parameters_on_disk) if keep_off else OffloadPolicy(),
            # False (stages 1 and 2): keep gathered parameters for the backward pass. True: free them after the forward
            # pass, and gather them again. A number: in between, keep them sharded over that many ranks.
            "reshard_after_forward": zero.stage == 3 and (group if group > 1 else True),
        }
        if precision.compute != torch.float32:
            keep_statistics_wide(model)
        allow_partial_calls(model, shard(model, zero, precision, options))
        write_back(model, placed, HOST if keep_off else world.device)
        self.module = model
        # Listed once: a walk over all modules takes as long as a step of a small one.
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if world.device.type == "cpu":
            for number, unit in enumerate(self._units):
                exchange_directly(unit, number)
        if zero.offload != "none":
            use_cores(world.device)
        if zero.parameters_on_disk:
            self._on_disk = ShardsOnDisk(self._units, disk, zero, world)
        self._set_masters(zero, precision, left)
        # Whether each parameter is trained, when its sharded and its gathered tensor last agreed on it.
        known = (parameter for unit in self._units for parameter in list_sharded(unit))
        self._trained = {parameter: bool(parameter.sharded_param.requires_grad) for parameter in known}
        self._all = dict(model.named_parameters())
        named = {id(parameter): name for name, parameter in self._all.items()}
        names = {parameter: named[id(parameter.sharded_param)] for parameter in self._trained}
        self._order = CollectiveOrder(self._units, names, world, orders_gathers=zero.stage < 3)
        _announce(model, calls=zero.stage == 3)
        # Without reducing, FSDP2 accumulates in a unit's reduce dtype. To accumulate in fp32, reduce each micro step
        # into the sharded parameters.
        travels_low = precision.reduce != torch.float32 or precision.autocast is not None
        self._defers = zero.stage == 1 and not (precision.accumulate == torch.float32 and travels_low)
        self._defers &= precision.held(1) is None
        self._shared_buffers = SharedBuffers(model, world)
        show_whole_state(model, precision.compute, world)

    def _set_masters(self, zero: Zero, precision: Precision, left: dict[str, nn.Parameter]) -> None:
        """Sets the masters: the sharded parameters; or if only the optimizer is offloaded, copies of them on the host.

        left: parameters that are not sharded, by name.
        """
        # Each p is a DTensor: p.shape is the whole parameter's, local(p) this rank's part, [ceil(dim 0 / ranks), ...].
        trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        offload = zero.offload_optimizer if zero.offload == "optimizer" else None
        host = choose_host(trainable, offload.ratio) if offload else set(left) if zero.offload == "param" else set()
        whole = {name: p for name, p in trainable.items() if name in left}
        self._unsharded = Unsharded(whole, host, self._mesh, self.world, precision.compute)
        self.masters = {**trainable, **self._unsharded.masters}
        self._stays_on_host = zero.offload == "param"
        if offload is None:
            return
        # Gradients get the dtype of the shards, so shards may only be cast if gradients are reduced in that dtype
        # anyway.
        low = precision.compute if precision.compute == precision.reduce != torch.float32 else None
        copied = {name: p for name, p in trainable.items() if (low or name in host) and name not in whole}
        self.copies = Masters(copied, host, pin=offload.pin_memory, disk=self.disk, dtype=precision.master)
        if low:
            _cast(self.module, list(copied.values()), low)
        # FSDP2 leaves a gradient on a shard only once it is reduced, so it may go to the host at once.
        self.copies.stream(lambda: True)
        self.masters = {name: self.copies.masters.get(name, p) for name, p in self.masters.items()}

    def start_micro_step(self, boundary: bool, sync: bool = True) -> None:
        self._shared_buffers.share()
        if self._on_disk is not None:
            self._on_disk.ends = boundary
        # Setting the flags visits every unit, which costs more than the step of a small model. Most calls change
        # nothing.
        if (boundary, sync) == self._flags:
            return
        self._flags = (boundary, sync)
        root = cast(FSDPModule, self.module)
        root.set_requires_gradient_sync(sync and (boundary or not self._defers))
        # Stages 1 and 2 keep gathered parameters between micro steps; stage 3 frees each block after each use.
        if self._stage < 3:
            root.set_reshard_after_backward(boundary)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_freezing()
        return super()._call(*args, **kwargs)

    def _follow_freezing(self) -> None:
        """Applies changes of requires_grad to both tensors of a parameter, the sharded and the gathered one.

        A program changes the one that it sees. FSDP2 sets the gathered one to the sharded one when it gathers, so a
        hidden gathered one tells nothing: peft freezes adapters for a pass without gradients, then thaws their shards.
        """
        thawed = False
        for parameter, trained in self._trained.items():
            sharded, gathered = parameter.sharded_param, find_gathered(parameter)
            if sharded.requires_grad is trained and (gathered is None or gathered.requires_grad is trained):
                continue
            gathered = sharded if gathered is None else gathered
            seen = gathered if is_shown_whole(parameter) else sharded
            if trained == sharded.requires_grad == seen.requires_grad:
                gathered.requires_grad_(trained)
            else:
                self._trained[parameter] = not trained
                sharded.requires_grad_(not trained)
                gathered.requires_grad_(not trained)
                thawed = thawed or not trained
        if thawed:
            for unit in self._units:
                look_again_at_dtypes(unit)

    def reduce_gradients(self) -> None:
        own = {parameter: find_own_gradient(parameter) for parameter in self._trained}
        # A program that calls parts of the model itself leaves gradients too.
        if self._order.has_unreduced or any(gradient is not None for gradient in own.values()):
            self._reduce_left(own)
        self._order.agree()
        self._unsharded.reduce()

    @torch.no_grad()
    def _reduce_left(self, own: Mapping[Any, Tensor | None]) -> None:
        """Reduces the gradients that backward passes have left on some rank. own: those of this rank."""
        # uint8 [parameters]: 1 where any rank has one. All ranks must reduce the same.
        left = torch.tensor([g is not None for g in own.values()], dtype=torch.uint8, device=self.world.device)
        dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self.world.data_group)
        for (parameter, gradient), is_left in zip(own.items(), left.tolist(), strict=True):
            if not is_left:
                continue
            if gradient is None:
                gradient = torch.zeros_like(cast(Tensor, find_gathered(parameter)))
            else:
                self._order.has_gradient(parameter)
            # [whole shape] on each rank. Dividing before the sum keeps fp16 from overflowing in it.
            sent = gradient.to(marked_dtype(parameter.sharded_param) or self._reduce_dtype) / self._mesh.size()
            # Partial: the ranks' tensors are summands. Redistributing to the shards' placement is a reduce-scatter.
            whole = DTensor.from_local(sent, self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            placed = whole.redistribute(placements=parameter.sharded_param.placements)
            share = placed.to(parameter.sharded_param.dtype)
            if parameter.offload_to_cpu:
                share = parameter.to_sharded_dtensor(local(share).cpu())
            before = parameter.sharded_param.grad
            parameter.sharded_param.grad = share if before is None else before + share
            # FSDP2 would otherwise reduce the same gradient again in the next backward pass.
            drop_own_gradient(parameter)

    def find_unused(self) -> Collection[str]:
        return self.masters.keys() & self._order.find_unused()

    def end_backward(self) -> None:
        # FSDP2 ignores these parameters, so nothing else reduces their gradients.
        self._unsharded.reduce()

    def own_gradient(self, name: str) -> Tensor | None:
        if name in self._unsharded.masters:
            return self._unsharded.own_gradient(name)
        known = (p for unit in self._units for p in list_sharded(unit) if name_of(p) == name)
        return next(map(find_own_gradient, known), None)

    def finish_step(self) -> None:
        super().finish_step()
        self._unsharded.give_weights()
        self._shared_buffers.end_step()
        self._order.begin_step()
        # Only a backward pass at the boundary frees gathered parameters. After an evaluation, a call of the module
        # itself, or if the program has moved the boundary, they would be outdated in the next step.
        self.free_gathered()
        if self._keeps_gathered:
            self._gather()

    def drop_gradients(self) -> None:
        self._follow_freezing()
        # Once for the tensors that the module shows at the moment, perhaps gathered ones; below, once more for the
        # shards, which it shows after `reshard`.
        super().drop_gradients()
        for unit in self._units:
            # Micro steps before the boundary may have left parameters gathered, and sums in a wider dtype beside them.
            for parameter in list_sharded(unit):
                drop_own_gradient(parameter)
            unit.reshard()
        self._order.begin_step()
        self._unsharded.drop_gradients()
        super().drop_gradients()

    def move_weights(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move_weights(lambda t: t if self._stays_on_host and isinstance(t, DTensor) else move(t))
        self._unsharded.move(move)

    def weights_changed(self) -> None:
        super().weights_changed()
        self._unsharded.give_weights()

    def shown(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().shown()
        yield from self._all.items()
        # Also whole tensors that are freed at the moment: a program may have kept them.
        for parameter in (parameter for unit in self._units for parameter in list_sharded(unit)):
            name, gathered = name_of(parameter), find_gathered(parameter)
            if name is not None and gathered is not None:
                yield name, gathered

    def begin_again(self) -> None:
        """Gets ready for a new engine. Raises UsageError if other parameters are trained now, and these or their
        masters are not sharded."""
        self._follow_freezing()
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        if trained != self.masters.keys():
            if self.copies is not None or self._unsharded.masters:
                raise UsageError(
                    "the model is already sharded by an earlier engine, which trained other parameters",
                    hint="freeze or thaw before the first initialize, or create a new model",
                )
            self.masters = {name: self._all[name] for name in self._all if name in trained}
        self.drop_gradients()
        self.guard, self.averages, self._flags = None, {}, None

    def free_gathered(self) -> None:
        self._follow_freezing()
        for unit in self._units:
            unit.reshard()
        self._order.forget_gathered()
        if self._on_disk is not None:
            self._on_disk.forget()

    def keep_gathered(self) -> None:
        if self._stage == 3:
            return
        if not self._keeps_gathered:
            begin_calls(cast(FSDPModule, self.module))
            for unit in self._units:
                keep_gathered_in_state_dict(unit)
                for owner in list_owners(unit):
                    owner.register_state_dict_pre_hook(lambda *_: self._free_unless_whole())  # type: ignore[no-untyped-call]
        self._keeps_gathered = True
        self._gather()

    def _gather(self) -> None:
        for unit in self._units:
            unit.unshard()

    def _free_unless_whole(self) -> None:
        """Before `state_dict()`: between a backward pass and the step, some blocks may be gathered, and others not."""
        if not all(map(is_gathered, self._units)):
            self.free_gathered()

    def weights(self) -> dict[str, Tensor]:
        self._order.check()
        # Not from the module: after an evaluation, it may still have gathered parameters. These are always sharded.
        return {name: self.masters.get(name, parameter).data for name, parameter in self._all.items()}


def _cast(model: nn.Module, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
    """Casts sharded parameters, in place. FSDP2 reads their dtype again when the first forward pass begins."""
    chosen = {id(parameter) for parameter in parameters}
    change_tensors(model, lambda tensor: tensor.to(dtype) if id(tensor) in chosen else tensor)


def _refuse_groups(zero: Zero, world: World) -> None:
    for key, size, off in (
        ("zero_hpz_partition_size", zero.zero_hpz_partition_size, 1),
        ("mics_shard_size", zero.mics_shard_size, 0),
    ):
        if size > off and world.model.size > 1:
            raise UsageError(
                f"zero_optimization.{key} is {size}: groups among the data-parallel ranks of a model that ranks divide"
                " are not supported",
                hint="omit it to shard over all data-parallel ranks",
            )
        if size > 0 and world.data_size % size:
            fits = [str(n) for n in range(1, world.data_size + 1) if world.data_size % n == 0]
            raise UsageError(
                f"zero_optimization.{key}: {world.data_size} ranks do not divide into groups of {size}",
                hint=f"use one of {', '.join(fits)}, or another number of ranks",
            )


def _announce(model: nn.Module, *, calls: bool) -> None:
    """Tells programs that parameters must be gathered. calls: also that within a call of the model, those outside the
    blocks are: TRL asks before it uses a head's weight without calling the head.

    FSDP2 creates their whole tensors when it gathers them for the first time, in a hook that runs before the one here,
    whether the program calls the engine or the model itself.
    """
    for parameter in model.parameters():
        announce(parameter)
    told: list[Tensor] = []

    def tell(*_: Any) -> None:
        if not told:
            told.extend(cast(Tensor, find_gathered(parameter)) for parameter in list_sharded(cast(FSDPModule, model)))
            for gathered in told:
                announce(gathered, ShardStatus.AVAILABLE)

    if calls:
        model.register_forward_pre_hook(torch.compiler.disable(tell))  # type: ignore[no-untyped-call]


def _move_unshardable(model: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """The parameters that FSDP2 must ignore, by name. Moves them to `device`, which FSDP2 does not do for them."""
    left = {name: parameter for name, parameter in model.named_parameters() if is_unshardable(parameter)}
    for parameter in left.values():
        parameter.data = parameter.data.to(device)
    return left
