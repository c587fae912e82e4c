"""What an engine has counted, and the rates it trains with."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dsjob.compute.loss_scale import LossScaler
from dsjob.compute.verdict import Verdict
from dsjob.contract.spec import EngineSpec
from dsjob.engine.rhythm import Rhythm
from dsjob.parallel import Strategy


class Readings:
    """The part of an engine that reports its counters, loss scale, gradients and learning rates."""

    spec: EngineSpec
    rhythm: Rhythm
    strategy: Strategy
    optimizer: Optimizer | None
    _scaler: LossScaler | None
    _grad_norm: Tensor | None
    _step_applied: bool | None
    _verdict: Verdict | None

    def _settle(self) -> None:
        """Learns whether the last step was taken, where the device decides that; waits for it to come there."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        taken = verdict.read()
        self.rhythm.note_step(skipped=not taken)
        if self._step_applied is None:
            self._step_applied = taken

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage that was asked for."""
        return self.spec.zero_optimization.stage

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, those that an overflow left out too."""
        return self.rhythm.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of those steps, over all ranks."""
        return self.rhythm.global_samples

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out since gradients were not finite; `global_steps` counts them too."""
        self._settle()
        return self.rhythm.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` has changed the weights: False off the boundary, and after an overflow."""
        self._settle()
        return bool(self._step_applied)

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the gradients of the last optimizer step, over all ranks, before clipping; 0.0 before any.

        Loss scaling does not show in it; inf or nan where gradients were not finite.
        """
        return float(self._grad_norm) if self._grad_norm is not None else 0.0

    def count_parameters(self) -> tuple[int, int]:
        """Elements of all parameters, tied ones once, and of those that are trained."""
        total = sum(weight.numel() for weight in self.strategy.weights().values())
        return total, sum(master.numel() for master in self.strategy.masters.values())

    def loss_scale(self) -> float:
        """What the next backward pass multiplies the loss by; 1.0 where losses are not scaled."""
        return self._scaler.scale if self._scaler is not None else 1.0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step; where the program says so, True inside `step` alone."""
        return self.rhythm.boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says of this and the following micro steps whether they end with an optimizer step; None: count again."""
        self.rhythm.require_managed("set_gradient_accumulation_boundary()")
        self.rhythm.forced = is_boundary

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, as the next optimizer step will use it."""
        return [float(rate) for rate in self._read_groups("lr")]

    def set_lr(self, lr: float) -> None:
        """Gives every parameter group the rate `lr`; a schedule sets it anew when it steps."""
        self._settle()
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def _read_groups(self, key: str) -> list[Any]:
        self._settle()
        return [group[key] for group in self.optimizer.param_groups if key in group] if self.optimizer else []
