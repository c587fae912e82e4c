"""The names that are listed so that torch need not be imported, against torch itself."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer, lr_scheduler

from dsjob.contract.torch_names import OPTIMIZERS, SCHEDULES


def test_every_optimizer_of_torch_is_listed() -> None:
    found = {n for n, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
    assert set(OPTIMIZERS) == found - {"Optimizer"}


def test_every_schedule_of_torch_is_listed() -> None:
    kinds = {name: kind for name, kind in vars(lr_scheduler).items() if inspect.isclass(kind)}
    found = {name for name, kind in kinds.items() if issubclass(kind, lr_scheduler.LRScheduler)}
    assert set(SCHEDULES) == {name for name in found if not name.startswith(("_", "LRScheduler"))}
