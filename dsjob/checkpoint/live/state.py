"""The training state of an engine as checkpoints store it: tensors by name, and plain values.

Tensors are named `model.<parameter or buffer>` and `optimizer.<parameter>.<key>`, where `<parameter>` is its name in
the unsharded model. So a checkpoint of any world size and stage loads at any other. Optimizer state that differs by
rank (`own_state`) is stored as `optimizer.<parameter>.<key>@rank` with shape [ranks, ...], and loads only at the same
world size. Averages of weights are stored like optimizer state with the key `ema`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from dsjob.checkpoint.format.zero_to_fp32 import AVERAGE
from dsjob.checkpoint.live.split_tensors import SplitTensor
from dsjob.checkpoint.live.stages import take_own
from dsjob.compute.loss_scale import LossScaler
from dsjob.errors import CheckpointError
from dsjob.optim.closed_form import ClosedForm
from dsjob.optim.on_disk import StateOnDisk
from dsjob.optim.onebit.own_gradients import count_ranks, list_own_state
from dsjob.optim.shards import local, own_part, whole
from dsjob.ranks.splits import Split
from dsjob.torch_private import list_saved_buffers

BY_RANK = "@rank"
_ELSEWHERE = "dsjob run FOLDER/resolved.json output.dir=OTHER_FOLDER checkpoint.resume=FOLDER/, with your changes"
NOT_KEPT = ("params", "exp_avg_mask")  # keys of a parameter group that checkpoints do not store
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Saved = Tensor | SplitTensor  # by the names and with the shapes of the whole model


@dataclass(frozen=True)
class TrainingState:
    """References to the live objects of one engine. A save reads their tensors; a load writes into them."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    masters: dict[str, nn.Parameter]
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    scaler: LossScaler | None
    device: torch.device
    pretrained: dict[str, Any] = field(default_factory=dict)  # see pretrained.describe_pretrained
    averages: Mapping[str, Tensor] = field(default_factory=dict)  # of masters, by name
    disk: StateOnDisk | None = None  # what makes new tensors of the optimizer's state, if not memory does
    splits: Mapping[str, Split] = field(default_factory=dict)  # of weights whose layers ranks divide, by name

    def model_tensors(self) -> dict[str, Saved]:
        """Parameters and buffers under their checkpoint names."""
        return {f"model.{n}": self._place(n, t.detach()) for n, t in {**self.weights, **self.buffers}.items()}

    def gather(self, name: str) -> Tensor:
        """A weight or buffer: whole, in its own dtype. It may share memory with the live one. A collective."""
        found = self.weights[name] if name in self.weights else self.buffers[name]
        return whole(found.detach(), self.splits.get(name))

    def fill(self, name: str, value: Tensor) -> None:
        """Writes a whole value to a weight or buffer: this rank's part of it. Raises CheckpointError."""
        place, split = {**self.weights, **self.buffers}[name], self.splits.get(name)
        shape = place.shape if split is None else split.shape(place.shape)
        if value.shape != shape:
            raise CheckpointError(f"{name} has shape {list(shape)} in the model, {list(value.shape)} in the state dict")
        local(place).copy_(own_part(value.to(device=self.device, dtype=place.dtype), place, split))

    def _place(self, name: str, tensor: Tensor) -> Saved:
        """A tensor that belongs to a parameter, as a part of the whole one if it is divided as the parameter is."""
        split = self.splits.get(name)
        divided = split is not None and tensor.shape == self.weights[name].shape
        return SplitTensor(tensor, split) if split is not None and divided else tensor

    def optimizer_tensors(self) -> dict[str, Saved]:
        """The optimizer's tensors under their checkpoint names."""
        # Asked in each save: the momenta of ZeroOneAdam differ between ranks only after its freeze step.
        own = list_own_state(self.optimizer)
        tensors: dict[str, Saved] = {}
        for name, entry in self._optimizer_entries().items():
            # Entries that are not tensors go to state.json: see `optimizer_values`.
            for key, value in entry.items():
                if isinstance(value, Tensor) and key in own:
                    tensors[f"optimizer.{name}.{key}{BY_RANK}"] = _stack_ranks(value)
                elif isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = self._place(name, value)
        return tensors | self._average_tensors()

    def _average_tensors(self) -> dict[str, Saved]:
        return {f"optimizer.{name}.{AVERAGE}": self._place(name, tensor) for name, tensor in self.averages.items()}

    def without_frozen(self) -> TrainingState:
        """This state without frozen parameters."""
        kept = {name: tensor for name, tensor in self.weights.items() if name in self.masters}
        return replace(self, weights=kept, aliases={n: first for n, first in self.aliases.items() if first in kept})

    def role(self, name: str) -> str:
        """The role of a tensor, by its checkpoint name: `parameter`, `frozen`, `buffer` or `optimizer`."""
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            return kind
        return "buffer" if rest not in self.weights else "parameter" if rest in self.masters else "frozen"

    def optimizer_values(self) -> dict[str, Any]:
        """The optimizer's parameter groups, with names in place of parameters, and its values that are not tensors."""
        if self.optimizer is None:
            return {}
        # torch's own state_dict numbers parameters by position. Names survive a change of order or of groups.
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

    def make_optimizer_tensors(self, shapes: Shapes) -> dict[str, Saved]:
        """Tensors to load into, for those of `shapes` (by checkpoint name) that belong to parameters of this model.

        Uses the optimizer's own tensors if they exist already. A new tensor is sharded like its parameter if it has the
        same shape, and otherwise whole on every rank. State that differs by rank is left out if the number of ranks has
        changed. Raises StorageError if the state is on a disk.
        """
        made: dict[str, Saved] = {}
        live: dict[str, Any] = {
            f"optimizer.{name}.{key}": self._place(name, value) if isinstance(value, Tensor) else value
            for name, entry in self._optimizer_entries().items()
            for key, value in entry.items()
        } | self._average_tensors()
        # Without an optimizer, as in an evaluation, no state of one is loaded.
        for full, (shape, dtype) in shapes.items() if self.optimizer is not None else ():
            name = full.removeprefix("optimizer.").rpartition(".")[0]
            master = self.masters.get(name)
            if master is None:
                continue
            # Shape [ranks, ...]: each rank reads its own row.
            if full.endswith(BY_RANK):
                if shape[0] == count_ranks():
                    made[full] = _stack_ranks(torch.empty(shape[1:], dtype=dtype, device=master.device))
                continue
            # Loading into the optimizer's own tensor saves a copy. A compiled optimizer also needs it to stay the same
            # object.
            kept = live.get(full)
            if isinstance(kept, Tensor | SplitTensor) and tuple(kept.shape) == tuple(shape) and kept.dtype == dtype:
                made[full] = kept
                continue
            if full.endswith(f".{AVERAGE}"):
                continue  # this run has no averages
            if tuple(self._place(name, master.data).shape) != tuple(shape):
                made[full] = torch.empty(shape, dtype=dtype)
            elif self.disk is not None and master.device.type == "cpu":
                made[full] = self._place(name, self.disk.make(master.data, dtype))
            else:
                made[full] = self._place(name, torch.empty_like(master.data, dtype=dtype))
        return made

    def load_optimizer(
        self, tensors: Mapping[str, Saved], values: Mapping[str, Any], elsewhere: Collection[str] = ()
    ) -> None:
        """Restores the optimizer. elsewhere: checkpoint names of tensors that only other stages of a pipeline have.

        Raises CheckpointError if its class or its parameter groups differ from the saved ones."""
        if self.optimizer is None or not values:
            return
        if elsewhere:
            values = take_own(values, self.weights, [name.removeprefix("model.") for name in elsewhere])
        kind = type(self.optimizer).__name__
        if values.get("class", kind) != kind:
            raise CheckpointError(
                f"the checkpoint was saved with the optimizer {values['class']}, but the job uses {kind}",
                hint=f"keep {values['class']}, or start a new run from these weights: {_ELSEWHERE}",
            )
        # Match groups by their sets of names. torch identifies parameters by position, but their order may have
        # changed.
        names, groups = self._names(), values["groups"]
        ours = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        theirs = [group["names"] for group in groups]
        # A group may be empty: the one without weight decay of an adapter, or any on a stage of a pipeline.
        before = self.optimizer.param_groups
        ours, theirs = ([group for group in each if group] for each in (ours, theirs))
        if sorted(map(sorted, ours)) != sorted(map(sorted, theirs)):
            raise CheckpointError(
                "the optimizer's parameters differ from those in the checkpoint",
                hint=_difference(ours, theirs),
            )
        # torch's load_state_dict takes state by parameter number, so number the names as they were saved.
        numbers = {name: index for index, name in enumerate(name for group in theirs for name in group)}
        state: dict[int, dict[str, Any]] = {}
        for full, tensor in tensors.items():
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            if key == AVERAGE:
                continue  # it was loaded in place
            tensor = tensor.tensor if isinstance(tensor, SplitTensor) else tensor
            if key.endswith(BY_RANK) and isinstance(tensor, DTensor):
                # This rank's row of [ranks, ...].
                key, tensor = key.removesuffix(BY_RANK), tensor.to_local()[0]
            state.setdefault(numbers[name], {})[key] = tensor
        for name, entry in values["values"].items():
            state.setdefault(numbers[name], {}).update({key: decode(value) for key, value in entry.items()})
        by_names = {tuple(sorted(group["names"])): group for group in groups}
        ordered = []
        for ours_in_group in ours:
            group = by_names[tuple(sorted(ours_in_group))]
            rest = {key: decode(value, self.device) for key, value in group.items() if key != "names"}
            ordered.append({**rest, "params": [numbers[name] for name in ours_in_group]})
        # load_state_dict replaces tensors in groups, such as a learning rate on the device.
        self.optimizer.param_groups = [group for group in before if group["params"]]
        own = [{k: v for k, v in group.items() if isinstance(v, Tensor)} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({"state": state, "param_groups": ordered})
        for loaded, held in zip(self.optimizer.param_groups, own, strict=True):
            _fill_held(loaded, held)
        _keep_dtypes(self.optimizer, state, [number for group in ordered for number in group["params"]])
        loaded_groups = iter(self.optimizer.param_groups)
        # In their order, which schedules know.
        self.optimizer.param_groups = [next(loaded_groups) if group["params"] else group for group in before]

    def scheduler_values(self) -> Any:
        """The schedule's state."""
        return encode(self.scheduler.state_dict(), "scheduler", tensors=True) if self.scheduler is not None else None

    def load_scheduler(self, values: Any, rates: bool = True) -> None:
        """Restores the schedule.

        Without `rates`, the optimizer keeps its current learning rates for one more step. So does DeepSpeed, whose
        schedules set learning rates only when they step.
        """
        if self.scheduler is not None and values is not None:
            state = decode(values, self.device)
            # Only the state of ReduceLROnPlateau has `num_bad_epochs`.
            if ("num_bad_epochs" in state) != isinstance(self.scheduler, ReduceLROnPlateau):
                raise CheckpointError(
                    f"the checkpoint's schedule cannot be loaded into {type(self.scheduler).__name__}: one of them"
                    " counts evaluations, the other steps",
                    hint=f"keep scheduler.type, or start a new run from these weights: {_ELSEWHERE}",
                )
            if isinstance(self.scheduler, ClosedForm) and not rates:
                self.scheduler.count_from(state)
            else:
                self.scheduler.load_state_dict(state)

    def load_rates(self, rates: Sequence[float]) -> None:
        """Sets the learning rate of each parameter group. Does nothing unless there is one for each, or if the schedule
        computes its rates from the step."""
        groups = self.optimizer.param_groups if self.optimizer else []
        if len(rates) == len(groups) and not isinstance(self.scheduler, ClosedForm):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def scaler_values(self) -> dict[str, Any] | None:
        """The state of the loss scale; None without fp16."""
        return self.scaler.state() if self.scaler is not None else None

    def load_scaler(self, values: Mapping[str, Any] | None) -> None:
        """Restores the loss scale, if both the checkpoint and this run have one."""
        if self.scaler is not None and values is not None:
            self.scaler.load(values)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.masters.items()}

    def _optimizer_entries(self) -> dict[str, dict[str, Any]]:
        if self.optimizer is None:
            return {}
        names = self._names()
        return {names[id(parameter)]: entry for parameter, entry in self.optimizer.state.items()}


def _keep_dtypes(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]], numbers: Sequence[int]) -> None:
    """Puts state back that torch has rounded to the dtype of its parameter: fp32 state of bf16 masters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in state.get(number, {}).items():
            held = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(held, Tensor) and value.dtype == torch.float32 != held.dtype:
                optimizer.state[parameter][key] = value.to(held.device)


def _fill_held(group: dict[str, Any], held: Mapping[str, Tensor]) -> None:
    """Copies loaded values into the tensors that the group had before, because compiled optimizers keep referring to
    those."""
    for key, own in held.items():
        value = group.get(key)
        if isinstance(value, (int, float, Tensor)) and torch.as_tensor(value).shape == own.shape:
            own.copy_(torch.as_tensor(value))
            group[key] = own


def _stack_ranks(own: Tensor) -> DTensor:
    """One DTensor of shape [ranks, ...] whose rows are the tensors of the ranks. They must have the same shape."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, own.device.type)  # type: ignore[arg-type]
    # own[None]: [1, ...] on each rank, one row of the whole.
    return DTensor.from_local(own[None], mesh, [Shard(0)], run_check=False)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers in a module's state_dict, by name. Shared buffers appear once."""
    wanted = {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name in list_saved_buffers(owner)
    }
    return {name: buffer for name, buffer in module.named_buffers() if name in wanted}


def _difference(ours: list[list[str]], theirs: list[list[str]]) -> str:
    now, saved = {n for group in ours for n in group}, {n for group in theirs for n in group}
    new, gone = sorted(now - saved), sorted(saved - now)
    parts = [f"new: {', '.join(new[:5])}" if new else "", f"missing: {', '.join(gone[:5])}" if gone else ""]
    return "; ".join(part for part in parts if part) or "they are grouped differently"
