"""The part of an engine that reports where it runs, counters, learning rates, the loss scale and gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from dsjob.compute.precision import Precision
from dsjob.contract.spec import EngineSpec
from dsjob.engine.rhythm import Rhythm
from dsjob.engine.update import Update
from dsjob.parallel import Strategy
from dsjob.ranks.mesh import World


class Readings:
    """The part of an engine that reports where it runs, its counters, loss scale, gradients and learning rates."""

    spec: EngineSpec
    rhythm: Rhythm
    world: World
    precision: Precision
    strategy: Strategy
    optimizer: Optimizer | None
    _update: Update

    def _settle(self) -> None:
        """If the device decides about steps, finds out whether the last one was taken. Waits for the device."""
        taken = self._update.settle()
        if taken is not None:
            self.rhythm.note_step(skipped=not taken)

    def __repr__(self) -> str:
        """Such as `Engine(Net, 1,234 parameters, ZeRO stage 2, bf16, 4 ranks, step 10)`."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        size = f"{self.count_parameters()[0]:,} parameters"
        about = f"ZeRO stage {self.zero_stage}, {self.precision.name}, {ranks}, step {self.global_steps}"
        return f"{type(self).__name__}({type(self.strategy.module).__name__}, {size}, {about})"

    @property
    def device(self) -> torch.device:
        """Where the model and its batches are."""
        return self.world.device

    @property
    def global_rank(self) -> int:
        """This process's rank among all ranks of the job."""
        return self.world.everyone.rank

    @property
    def world_size(self) -> int:
        """The number of all ranks of the job. `world` says how they are divided."""
        return self.world.everyone.size

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in the config."""
        return self.spec.zero_optimization.stage

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, including those skipped because of an overflow."""
        return self.rhythm.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of those steps, over all ranks."""
        return self.rhythm.global_samples

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because gradients were not finite. `global_steps` includes them."""
        self._settle()
        return self.rhythm.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the weights. False if it was not at a boundary, or after an
        overflow."""
        self._settle()
        return bool(self._update.applied)

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the gradients of the last optimizer step, over all ranks, before clipping. 0.0 before the
        first.

        It is not affected by loss scaling. It is inf if the step was skipped because gradients were not finite, and
        inf or nan if the step was taken nevertheless.
        """
        norm = float(self._update.norm) if self._update.norm is not None else 0.0
        return math.inf if self._update.skips and math.isnan(norm) else norm

    def count_parameters(self) -> tuple[int, int]:
        """The number of elements of all parameters (tied ones once), and of the trained ones. Those of all ranks that
        hold one model together."""
        return self.strategy.pipeline.sizes if self.strategy.pipeline is not None else self.strategy.count()

    def loss_scale(self) -> float:
        """The factor on the loss in the next backward pass; 1.0 if losses are not scaled."""
        return self._update.loss_scale

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step. With `managed_gradient_accumulation` off, it is True
        only inside `step`."""
        return self.rhythm.boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether this and the following micro steps end with an optimizer step. None: count micro steps again."""
        self.rhythm.require_managed("set_gradient_accumulation_boundary()")
        self.rhythm.forced = is_boundary

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group in the next optimizer step; nan if the optimizer chooses it, as
        transformers' Adafactor may."""
        return [math.nan if rate is None else float(rate) for rate in self._read_groups("lr")]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups. A schedule changes it again when it steps."""
        self._settle()
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def _read_groups(self, key: str) -> list[Any]:
        self._settle()
        return [group[key] for group in self.optimizer.param_groups if key in group] if self.optimizer else []
