"""What a checkpoint holds of a training run, as tensors by name and plain values; and the way back.

Names: `model.<parameter or buffer>` and `optimizer.<parameter>.<key>`, the parameter as the unsharded model calls it,
so that a save of any world size and stage loads into any other. What an optimizer keeps that differs by rank (its
`own_state`) is `optimizer.<parameter>.<key>@rank`, [ranks, ...], and loads at the same world size alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dsjob.checkpoint.format.values import decode, encode
from dsjob.compute.loss_scale import LossScaler
from dsjob.errors import CheckpointError
from dsjob.optim.closed_form import ClosedForm
from dsjob.optim.onebit.signs import count_ranks

BY_RANK = "@rank"
_ELSEWHERE = "dsjob run FOLDER/resolved.json output.dir=OTHER_FOLDER checkpoint.resume=FOLDER/, with your changes"
NOT_KEPT = ("params", "exp_avg_mask")  # of a parameter group
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class TrainingState:
    """Views of the live objects of one engine: reading them saves, writing into them loads."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    masters: dict[str, nn.Parameter]
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    scaler: LossScaler | None
    device: torch.device
    pretrained: dict[str, Any] = field(default_factory=dict)  # see pretrained.describe_pretrained

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under their checkpoint names."""
        return {f"model.{name}": tensor.detach() for name, tensor in {**self.weights, **self.buffers}.items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors under their checkpoint names."""
        own = getattr(self.optimizer, "own_state", ())
        tensors: dict[str, Tensor] = {}
        for name, entry in self._optimizer_entries().items():
            for key, value in entry.items():
                if isinstance(value, Tensor) and key in own:
                    tensors[f"optimizer.{name}.{key}{BY_RANK}"] = _stack_ranks(value)
                elif isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def without_frozen(self) -> TrainingState:
        """The same without parameters that are not trained."""
        kept = {name: tensor for name, tensor in self.weights.items() if name in self.masters}
        return replace(self, weights=kept, aliases={n: first for n, first in self.aliases.items() if first in kept})

    def role(self, name: str) -> str:
        """What the tensor of a checkpoint name is: `parameter`, `frozen` (untrained), `buffer` or `optimizer`."""
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            return kind
        return "buffer" if rest not in self.weights else "parameter" if rest in self.masters else "frozen"

    def optimizer_values(self) -> dict[str, Any]:
        """The optimizer's parameter groups (with names in place of tensors) and values that are no tensors."""
        if self.optimizer is None:
            return {}
        names = self._names()
        groups = [
            {
                **{k: encode(v, f"optimizer.{k}", tensors=True) for k, v in group.items() if k not in NOT_KEPT},
                "names": [names[id(p)] for p in group["params"]],
            }
            for group in self.optimizer.param_groups
        ]
        values = {
            name: {key: encode(v, f"optimizer.{name}.{key}") for key, v in entry.items() if not isinstance(v, Tensor)}
            for name, entry in self._optimizer_entries().items()
        }
        return {
            "class": type(self.optimizer).__name__,
            "groups": groups,
            "values": {name: entry for name, entry in values.items() if entry},
        }

    def make_optimizer_tensors(self, shapes: Shapes) -> dict[str, Tensor]:
        """Tensors to read into, for each in `shapes` (by checkpoint name) that belongs to a parameter of this model.

        They are the optimizer's own where it has such ones already. New ones are sharded like the parameter where they
        have its shape, else whole on every rank. What differed by rank on another number of ranks is left out.
        """
        made: dict[str, Tensor] = {}
        live = {
            f"optimizer.{name}.{key}": value
            for name, entry in self._optimizer_entries().items()
            for key, value in entry.items()
        }
        for full, (shape, dtype) in shapes.items() if self.optimizer is not None else ():
            name = full.removeprefix("optimizer.").rpartition(".")[0]
            master = self.masters.get(name)
            if master is None:
                continue
            # [ranks, ...]: each rank reads its own row.
            if full.endswith(BY_RANK):
                if shape[0] == count_ranks():
                    made[full] = _stack_ranks(torch.empty(shape[1:], dtype=dtype, device=master.device))
                continue
            # Reading into the optimizer's own tensor saves a copy, and keeps what a compiled optimizer holds on to.
            kept = live.get(full)
            if isinstance(kept, Tensor) and tuple(kept.shape) == tuple(shape) and kept.dtype == dtype:
                made[full] = kept
                continue
            like = tuple(master.shape) == shape
            made[full] = torch.empty_like(master.data, dtype=dtype) if like else torch.empty(shape, dtype=dtype)
        return made

    def load_optimizer(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Gives the optimizer its state back. Raises CheckpointError where its parameter groups are others now."""
        if self.optimizer is None or not values:
            return
        kind = type(self.optimizer).__name__
        if values.get("class", kind) != kind:
            raise CheckpointError(
                f"the checkpoint holds the state of {values['class']}, but the optimizer is {kind} now",
                hint=f"keep {values['class']}, or begin a run with these weights: {_ELSEWHERE}",
            )
        # Groups are matched by their sets of names: the order of parameters may differ, and torch identifies by
        # position.
        names, groups = self._names(), values["groups"]
        ours = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        theirs = [group["names"] for group in groups]
        if sorted(map(sorted, ours)) != sorted(map(sorted, theirs)):
            raise CheckpointError(
                "the optimizer's parameters are not those that were saved",
                hint=_difference(ours, theirs),
            )
        numbers = {name: index for index, name in enumerate(name for group in theirs for name in group)}
        state: dict[int, dict[str, Any]] = {}
        for full, tensor in tensors.items():
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            if key.endswith(BY_RANK) and isinstance(tensor, DTensor):
                key, tensor = key.removesuffix(BY_RANK), tensor.to_local()[0]
            state.setdefault(numbers[name], {})[key] = tensor
        for name, entry in values["values"].items():
            state.setdefault(numbers[name], {}).update({key: decode(value) for key, value in entry.items()})
        by_names = {tuple(sorted(group["names"])): group for group in groups}
        ordered = []
        for ours_in_group in ours:
            group = by_names[tuple(sorted(ours_in_group))]
            kept = {key: decode(value, self.device) for key, value in group.items() if key != "names"}
            ordered.append({**kept, "params": [numbers[name] for name in ours_in_group]})
        own = [{k: v for k, v in group.items() if isinstance(v, Tensor)} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({"state": state, "param_groups": ordered})
        for loaded, held in zip(self.optimizer.param_groups, own, strict=True):
            _fill_held(loaded, held)

    def scheduler_values(self) -> Any:
        """The schedule's state."""
        return encode(self.scheduler.state_dict(), "scheduler", tensors=True) if self.scheduler is not None else None

    def load_scheduler(self, values: Any, rates: bool = True) -> None:
        """Gives the schedule its state back.

        Without `rates` the optimizer's groups keep theirs for one more step, as in DeepSpeed, whose schedules set rates
        when they step alone.
        """
        if self.scheduler is not None and values is not None:
            state = decode(values, self.device)
            if ("num_bad_epochs" in state) != isinstance(self.scheduler, ReduceLROnPlateau):
                raise CheckpointError(
                    f"the checkpoint's schedule and {type(self.scheduler).__name__} do not count the same: one of them"
                    " counts evaluations, the other steps",
                    hint=f"keep scheduler.type, or begin a run with these weights: {_ELSEWHERE}",
                )
            if isinstance(self.scheduler, ClosedForm) and not rates:
                self.scheduler.count_from(state)
            else:
                self.scheduler.load_state_dict(state)

    def scaler_values(self) -> dict[str, Any] | None:
        """The loss scale's state, with fp16."""
        return self.scaler.state() if self.scaler is not None else None

    def load_scaler(self, values: Mapping[str, Any] | None) -> None:
        """Gives the loss scale its state back, where there is one on both sides."""
        if self.scaler is not None and values is not None:
            self.scaler.load(values)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.masters.items()}

    def _optimizer_entries(self) -> dict[str, dict[str, Any]]:
        if self.optimizer is None:
            return {}
        names = self._names()
        return {names[id(parameter)]: entry for parameter, entry in self.optimizer.state.items()}


def _fill_held(group: dict[str, Any], held: Mapping[str, Tensor]) -> None:
    """Puts what was loaded into the tensors that the group had before: compiled optimizers hold on to them."""
    for key, own in held.items():
        value = group.get(key)
        if isinstance(value, (int, float, Tensor)) and torch.as_tensor(value).shape == own.shape:
            own.copy_(torch.as_tensor(value))
            group[key] = own


def _stack_ranks(own: Tensor) -> DTensor:
    """The ranks' own tensors of one shape as one, [ranks, ...]."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, own.device.type)  # type: ignore[arg-type]
    return DTensor.from_local(own[None], mesh, [Shard(0)], run_check=False)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a module's state, by name; shared ones once."""
    wanted = {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name in owner._buffers
        if name not in owner._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name in wanted}


def _difference(ours: list[list[str]], theirs: list[list[str]]) -> str:
    now, saved = {n for group in ours for n in group}, {n for group in theirs for n in group}
    new, gone = sorted(now - saved), sorted(saved - now)
    parts = [f"new: {', '.join(new[:5])}" if new else "", f"missing: {', '.join(gone[:5])}" if gone else ""]
    return "; ".join(part for part in parts if part) or "they are grouped in another way"
