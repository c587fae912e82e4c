"""Lets the GPU decide whether a step is skipped, so that the host does not wait for the gradient norm.

torch's fused optimizers read a flag, `found_inf`, on the device, and do nothing if it is set. The host learns of it one
step later. Until then, it assumes that the step was taken, as nearly all are. It can undo the step of the schedule.

The norm shows overflows. It is computed over all ranks from scaled gradients, so all ranks skip together without
another collective. A skipped step counts in global_steps and advances the data. This works only if all masters are on a
GPU and the optimizer is one of torch's fused ones; otherwise the host reads the norm once per step. bf16 steps that are
not finite are skipped too (`check_grad_overflow`). After `rhythm.MAX_SKIPPED` skips in a row, the engine raises an
error, because no loss scale would help.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.torch_private import can_skip_on_device

_decided: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # optimizers that can, and their groups at that time


def can_decide(optimizer: Optimizer) -> bool:
    """Whether `optimizer` can skip a step by a flag: a fused optimizer of torch, with all parameters on a GPU.

    Not before SGD has created its momentum buffers: if the step that creates them is skipped, they stay uninitialised.
    """
    if not can_skip_on_device(optimizer):
        return False
    groups, state = optimizer.param_groups, optimizer.state
    found = [(len(group["params"]), bool(group.get("momentum"))) for group in groups], len(state)
    if _decided.get(optimizer) == found:
        return True
    # A loop over all parameters, so its result is kept until groups or state change.
    able = all(
        p.is_cuda and not (group.get("momentum") and state.get(p, {}).get("momentum_buffer") is None)
        for group in groups
        for p in group["params"]
    )
    if able:
        _decided[optimizer] = found
    return able


class Verdict:
    """The device's decision about one step."""

    def __init__(self, optimizer: Optimizer, finite: Tensor) -> None:
        """Makes `optimizer` step only if `finite` (bool, shape [], on a GPU) is true."""
        # torch's GradScaler passes them as attributes too. They must not stay: later steps would read them.
        flags: Any = optimizer
        # fp32 [], 1 if the step must be skipped. grad_scale None: the optimizer has nothing to unscale.
        flags.grad_scale, flags.found_inf = None, (~finite).float()
        try:
            optimizer.step()
        finally:
            del flags.grad_scale, flags.found_inf
        self._optimizer = optimizer
        self._undo: tuple[LRScheduler, Mapping[str, Any], list[dict[str, Any]], list[dict[str, Any]]] | None = None
        # Copy the decision to pinned host memory in the background. `_event` marks when it has arrived.
        self._finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(finite.device))

    def step_schedule(self, scheduler: LRScheduler, arguments: Mapping[str, Any]) -> None:
        """Steps the schedule as if the optimizer had stepped. `read` can undo it."""
        # Schedules cannot step back, so keep everything that a step may change.
        state, before = _keep(scheduler.state_dict()), self._settings()
        scheduler.step(**arguments)
        self._undo = scheduler, state, before, self._settings()

    def read(self) -> bool:
        """Whether the step was taken. Waits for the device to reach it. If it was skipped, undoes the schedule's step.

        Keeps values that the program has set in the optimizer's groups in the meantime.
        """
        self._event.synchronize()
        taken = bool(self._finite)
        if not taken and self._undo is not None:
            # `before` and `after`: the groups' values around the schedule's step.
            scheduler, state, before, after = self._undo
            scheduler.load_state_dict(dict(state))
            for group, old, new in zip(self._optimizer.param_groups, before, after, strict=True):
                for key, value in old.items():
                    # Unequal: the program has set this value after the schedule did, so keep it.
                    if _is_same(group.get(key), new.get(key)):
                        _put_back(group, key, value)
        return taken

    def _settings(self) -> list[dict[str, Any]]:
        kept = (int, float, tuple, Tensor)
        return [
            {key: _keep(value) for key, value in group.items() if isinstance(value, kept)}
            for group in self._optimizer.param_groups
        ]


def _keep(value: Any) -> Any:
    """A copy of a setting or a schedule's state. Models, optimizers and parameters in it are not copied."""
    if isinstance(value, (nn.Module, nn.Parameter, Optimizer)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _keep(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_keep, value))
    return copy.deepcopy(value)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return bool(value == other)


def _put_back(group: dict[str, Any], key: str, value: Any) -> None:
    """Restores a group's value. Tensors are restored in place, because captured graphs and schedules refer to them."""
    if isinstance(value, Tensor) and isinstance(group[key], Tensor):
        group[key].copy_(value)
    else:
        group[key] = value
