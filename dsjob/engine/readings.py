"""What an engine has counted, and the rates it trains with: to be read, and set where programs for DeepSpeed do."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dsjob.compute.loss_scale import LossScaler
from dsjob.compute.verdict import Verdict
from dsjob.engine.rhythm import Rhythm
from dsjob.parallel import Strategy


class Readings:
    """The part of an engine that tells of its counters, batch sizes, loss scale, gradients and parameter groups."""

    rhythm: Rhythm
    strategy: Strategy
    optimizer: Optimizer | None
    _scaler: LossScaler | None
    _grad_norm: Tensor | None
    _step_applied: bool | None
    _verdict: Verdict | None

    def settle(self) -> None:
        """Learns whether the last step was taken, where the device decides that; waits for it to come there."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        taken = verdict.read()
        self.rhythm.note_step(skipped=not taken)
        if self._step_applied is None:
            self._step_applied = taken

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The optimizer: there is no wrapper around it."""
        return self.optimizer

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, those that an overflow left out too."""
        return self.rhythm.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of those steps, over all ranks."""
        return self.rhythm.global_samples

    @property
    def micro_steps(self) -> int:
        """Calls of `step` so far."""
        return self.rhythm.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out since gradients were not finite; `global_steps` counts them too."""
        self.settle()
        return self.rhythm.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` has changed the weights: False off the boundary, and after an overflow."""
        self.settle()
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

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Nothing, as DeepSpeed gives without `wall_clock_breakdown`, which has no effect here."""
        return {}

    def loss_scale(self) -> float:
        """What the next backward pass multiplies the loss by; 1.0 where losses are not scaled."""
        return self._scaler.scale if self._scaler is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self._scaler is not None and self._scaler.dynamic

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step; where the program says so, True inside `step` alone."""
        return self.rhythm.boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says of this and the following micro steps whether they end with an optimizer step; None: count again."""
        self.rhythm.require_managed("set_gradient_accumulation_boundary()")
        self.rhythm.forced = is_boundary

    def train_batch_size(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        return self.rhythm.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward pass of one rank."""
        return self.rhythm.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Backward passes in one optimizer step."""
        return self.rhythm.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch, micro batch and accumulation steps."""
        return self.rhythm.train_batch, self.rhythm.micro_batch, self.rhythm.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another train batch, by another number of accumulation steps. Raises UsageError for no multiple of one."""
        self.rhythm.set_train_batch(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another micro batch, and with the same number of accumulation steps another train batch."""
        self.rhythm.micro_batch = micro_batch_size

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, as the next optimizer step will use it."""
        return [float(rate) for rate in self._read_groups("lr")]

    def set_lr(self, lr: float) -> None:
        """Gives every parameter group the rate `lr`; a schedule sets it anew when it steps."""
        self.settle()
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group: `betas`, or `momentum` where the optimizer has none."""
        return self._read_groups("momentum" if self._read_groups("momentum") else "betas")

    def get_type(self) -> list[Any]:
        """`type` of each parameter group, 0.0 where it has none."""
        return [group.get("type", 0.0) for group in self.optimizer.param_groups] if self.optimizer else []

    def _read_groups(self, key: str) -> list[Any]:
        self.settle()
        return [group[key] for group in self.optimizer.param_groups if key in group] if self.optimizer else []
