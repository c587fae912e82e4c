"""Steps of which the device decides whether they are taken, so that the host need not wait for it.

torch's fused optimizers take a flag, `found_inf`, and do nothing where it is set. The host learns of it later: until
then it goes on as if the step had been taken, which nearly all are, and what it did to the schedule can be undone.

The norm reveals overflows: it is computed over all ranks from scaled gradients, so all ranks skip together without
another collective. A skipped step counts in global_steps and advances the data. The device decides only where all
masters are on a GPU and the optimizer is one of torch's fused ones; elsewhere the host reads the norm once a step.
bf16 steps that are not finite are skipped too (`check_grad_overflow`). After `rhythm.MAX_SKIPPED` in a row the engine
raises: no loss scale would help.
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

_decided: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # that may, and what they were like


def can_decide(optimizer: Optimizer) -> bool:
    """Whether `optimizer` can leave out a step by a flag: one of torch's fused ones, all of it on a GPU.

    Not yet where SGD is to make buffers of momentum: it would keep them, unwritten, after a step that is left out.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups, state = optimizer.param_groups, optimizer.state
    found = [(len(group["params"]), bool(group.get("momentum"))) for group in groups], len(state)
    if _decided.get(optimizer) == found:
        return True
    able = all(
        p.is_cuda and not (group.get("momentum") and state.get(p, {}).get("momentum_buffer") is None)
        for group in groups
        for p in group["params"]
    )
    if able:
        _decided[optimizer] = found
    return able


class Verdict:
    """What the device has decided of one step."""

    def __init__(self, optimizer: Optimizer, finite: Tensor) -> None:
        """Lets `optimizer` take its step where `finite` (bool [], on a GPU) is true."""
        flags: Any = optimizer
        flags.grad_scale, flags.found_inf = None, (~finite).float()
        try:
            optimizer.step()
        finally:
            del flags.grad_scale, flags.found_inf
        self._optimizer = optimizer
        self._undo: tuple[LRScheduler, Mapping[str, Any], list[dict[str, Any]], list[dict[str, Any]]] | None = None
        self._finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(finite.device))

    def step_schedule(self, scheduler: LRScheduler, arguments: Mapping[str, Any]) -> None:
        """Steps the schedule, as after a step that was taken."""
        state, before = _keep(scheduler.state_dict()), self._settings()
        scheduler.step(**arguments)
        self._undo = scheduler, state, before, self._settings()

    def read(self) -> bool:
        """Whether the step was taken. Waits for the device to come to it; undoes the schedule's step if it was not.

        What the program has set in the optimizer's groups meanwhile stays.
        """
        self._event.synchronize()
        taken = bool(self._finite)
        if not taken and self._undo is not None:
            scheduler, state, before, after = self._undo
            scheduler.load_state_dict(dict(state))
            for group, old, new in zip(self._optimizer.param_groups, before, after, strict=True):
                for key, value in old.items():
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
    """A copy of a setting or a schedule's state, with the same models, optimizers and parameters in it."""
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
    """Into the tensor of the group, where it is one, which captured graphs and schedules hold."""
    if isinstance(value, Tensor) and isinstance(group[key], Tensor):
        group[key].copy_(value)
    else:
        group[key] = value
