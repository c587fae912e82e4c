"""Reads and writes the weights and optimizer state of a model that DeepSpeed trains: whole, and in fp32.

DeepSpeed steps flat pieces of many parameters. This module restores their names and shapes, so that the checkpoints are
dsjob's own: either engine resumes from them, and every tool reads them. While being read, the whole state is in host
memory on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dsjob.compute.loss_scale import LossScaler

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], Optimizer]
# Where DeepSpeed's optimizers keep the flat masters of this rank: stage 3, 1 and 2, and 1 with gradients in fp32.
_FLAT = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


class DeepSpeedState:
    """The state of one DeepSpeed engine. optimizer: the one it steps. groups: the names of its parameters, by group.
    make_optimizer: builds one of the same kind for other parameters. `gather` and `scatter` are collectives.
    """

    def __init__(
        self, driven: Any, optimizer: Optimizer, groups: Sequence[Sequence[str]], make_optimizer: MakeOptimizer
    ) -> None:
        self._driven, self._optimizer, self._make_optimizer = driven, optimizer, make_optimizer
        self._parameters: dict[str, nn.Parameter] = dict(driven.module.named_parameters())
        self._trained = dict.fromkeys(name for group in groups for name in group)  # in order
        outer = driven.optimizer
        # 1-dim fp32 pieces of this rank. Empty at stage 0, where nothing is flat.
        self._flat: list[Tensor] = next((list(getattr(outer, name)) for name in _FLAT if hasattr(outer, name)), [])
        # At stage 0 in bf16, each parameter has its own master; in fp32, the parameter is its own master.
        pairs = zip(groups, getattr(outer, "fp32_groups", ()), strict=False)
        self._masters = {name: master for names, masters in pairs for name, master in zip(names, masters, strict=True)}

    def count_parameters(self) -> tuple[int, int]:
        """The number of elements of all parameters, and of the trained ones."""
        # At stage 3, `numel()` of a released parameter is 0, so DeepSpeed keeps the real number in ds_numel.
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self._parameters.items()}
        return sum(sizes.values()), sum(sizes[name] for name in self._trained)

    @torch.no_grad()
    def gather(self) -> tuple[dict[str, Tensor], dict[str, nn.Parameter], Optimizer]:
        """Copies on the host: all weights by name, the trained ones as parameters, and an optimizer over the latter."""
        masters = {name: nn.Parameter(self._read(name)) for name in self._parameters if name in self._trained}
        weights = {n: masters[n].data if n in masters else self._read_frozen(p) for n, p in self._parameters.items()}
        optimizer = self._make_optimizer(masters)
        for theirs, ours in zip(self._optimizer.param_groups, optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        # Some optimizers, such as Adagrad, create state when they are built. Here, all of it comes from DeepSpeed.
        optimizer.state.clear()
        for name, master in masters.items():
            entry = self._read_state(name)
            if entry:
                optimizer.state[master] = entry
        return weights, masters, optimizer

    @torch.no_grad()
    def scatter(self, weights: Mapping[str, Tensor], optimizer: Optimizer | None) -> None:
        """Writes weights, optimizer state and the values of parameter groups to DeepSpeed."""
        for name, value in weights.items():
            self._write(name, value)
        if optimizer is None:
            return
        names = {id(p): name for p, name in zip(_list(optimizer), self._trained, strict=True)}
        state = {names[id(p)]: entry for p, entry in optimizer.state.items()}
        self._make_room(state)
        for name, entry in state.items():
            self._write_state(name, entry)
        for theirs, ours in zip(self._optimizer.param_groups, optimizer.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})

    def read_scaler(self, scaler: LossScaler) -> None:
        """Copies the state of DeepSpeed's loss scaler to `scaler`."""
        place = self._scaler()
        scaler.load(
            {
                "scale": float(place.cur_scale),
                "dynamic": scaler.dynamic,
                "step": getattr(place, "cur_iter", 0),
                "last_overflow": getattr(place, "last_overflow_iter", -1),
                "borne": getattr(place, "cur_hysteresis", 1),
            }
        )

    def write_scaler(self, scaler: LossScaler) -> None:
        """Copies the state of `scaler` to DeepSpeed's loss scaler."""
        place, state = self._scaler(), scaler.state()
        if not scaler.dynamic:
            return
        names = {"cur_scale": "scale", "cur_iter": "step", "last_overflow_iter": "last_overflow"}
        for theirs, ours in {**names, "cur_hysteresis": "borne"}.items():
            if hasattr(place, theirs):
                setattr(place, theirs, state[ours])

    def _scaler(self) -> Any:
        return self._driven.optimizer.loss_scaler

    def _read(self, name: str, key: str | None = None) -> Tensor:
        """A copy of a trained parameter's master, or of a tensor of its optimizer state: whole, fp32, on the host."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self._parameters[name]
        value: Tensor
        # Stage 0: each parameter, or its own master, has the whole value.
        if not self._flat:
            master = self._masters.get(name, parameter)
            value = master if key is None else self._optimizer.state[master][key]
        elif key is None:
            value = safe_get_full_fp32_param(parameter)
        else:
            value = safe_get_full_optimizer_state(parameter, key)
        # ds_shape: the whole shape of a parameter that stage 3 has released.
        return value.detach().to("cpu", torch.float32, copy=True).reshape(getattr(parameter, "ds_shape", value.shape))

    def _read_frozen(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return parameter.detach().to("cpu", copy=True)

    def _read_state(self, name: str) -> dict[str, Any]:
        if not self._flat:
            entry = self._optimizer.state.get(self._masters.get(name, self._parameters[name]), {})
            return {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in entry.items()}
        # All pieces step together, so values without the shape of a piece (such as `step`) are the same in each.
        piece = next((p for p in self._flat if self._optimizer.state.get(p)), None)
        entry = self._optimizer.state[piece] if piece is not None else {}
        return {
            key: self._read(name, key)
            if piece is not None and _is_like(value, piece)
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in entry.items()
        }

    def _write(self, name: str, value: Tensor) -> None:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        parameter = self._parameters[name]
        # ds_id: only parameters that stage 3 has partitioned have one. Others need no gathering.
        with GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
            parameter.copy_(value)
        if name in self._masters:
            self._masters[name].copy_(value)
        elif self._flat and name in self._trained:
            _set(parameter, value, safe_set_local_fp32_param, safe_set_full_fp32_param)

    def _make_room(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Allocates zeros in the state of the flat pieces for each key of `state`; nothing if `state` is empty, as
        before the first step."""
        self._optimizer.state.clear()
        # DeepSpeed keeps views of the old state. Unlinked, it makes new ones from the state below.
        if hasattr(self._driven.optimizer, "_hp_optimizer_states_linked"):
            self._driven.optimizer._hp_optimizer_states_linked = False
        if not (self._flat and state):
            return
        name, entry = next(iter(state.items()))
        shape = getattr(self._parameters[name], "ds_shape", self._parameters[name].shape)
        for piece in self._flat:
            made = self._optimizer.state[piece]
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    made[key] = torch.zeros_like(piece)
                else:
                    made[key] = value.clone() if isinstance(value, Tensor) else value
        if hasattr(self._driven.optimizer, "_hp_optimizer_states_linked"):
            # Creates the views by which the functions in `deepspeed.utils` find the state of one parameter.
            self._driven.optimizer._lazy_init_hp_params_optimizer_state()

    def _write_state(self, name: str, entry: Mapping[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        parameter = self._parameters[name]
        if not self._flat:
            master = self._masters.get(name, parameter)
            placed = {k: v.to(master.device) if isinstance(v, Tensor) and k != "step" else v for k, v in entry.items()}
            self._optimizer.state[master] = placed
            return
        shape = getattr(parameter, "ds_shape", parameter.shape)
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == shape:
                _set(parameter, value, safe_set_local_optimizer_state, safe_set_full_optimizer_state, key)


def _set(
    parameter: Any, value: Tensor, set_part: Callable[..., None], set_whole: Callable[..., None], *key: str
) -> None:
    """Writes a whole value. (At stage 3, DeepSpeed's own function fails if the ranks' parts have unequal sizes.)"""
    placed = value.to(parameter.device)
    if not hasattr(parameter, "ds_id"):
        set_whole(parameter, placed, *key)
        return
    # DeepSpeed flattens the parameter and cuts it into equal parts, the last one padded.
    size, rank = parameter.ds_tensor.numel(), dist.get_rank(parameter.ds_process_group)
    part = placed.flatten()[rank * size : (rank + 1) * size]
    set_part(parameter, nn.functional.pad(part, (0, size - part.numel())), *key)


def _is_like(value: Any, piece: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.shape


def _list(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
