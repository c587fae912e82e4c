"""The update of the weights at a boundary: clips the reduced gradients, then steps the optimizer or skips the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.compute.loss_scale import LossScaler
from dsjob.compute.precision import Precision
from dsjob.compute.verdict import Verdict, can_decide
from dsjob.contract.spec import EngineSpec
from dsjob.errors import UsageError
from dsjob.optim.narrow import find_kept
from dsjob.parallel import Strategy
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import Ranks


class Update:
    """Takes one optimizer step after another, and knows how the last one ended.

    norm: the gradients' L2 norm over all ranks, unscaled and before clipping (fp32, shape []); None before the first
    step. applied: whether the last call of the engine's `step` changed the weights; None until `settle` has read the
    device's decision. skips: steps with gradients that are not finite are skipped. divisor: of this step's gradients.
    """

    def __init__(self, strategy: Strategy, spec: EngineSpec, precision: Precision, everyone: Ranks) -> None:
        self._strategy, self._limit, self._everyone = strategy, spec.gradient_clipping, everyone
        self.scaler = LossScaler(spec.fp16) if precision.needs_scale else None
        self.skips = precision.needs_scale or (precision.compute == torch.bfloat16 and spec.bf16.check_grad_overflow)
        self.norm: Tensor | None = None
        self.divisor: Tensor | None = None
        self.applied: bool | None = False
        # The optimizer does not have them. A program may train them later by mistake.
        self._frozen = [(name, tensor) for name, tensor in strategy.shown() if not tensor.requires_grad]
        self._verdict: Verdict | None = None  # the device's decision about the last step, until the host reads it

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward pass; 1.0 if losses are not scaled."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def pending(self) -> bool:
        """Whether the device has decided about the last step, and the host has not read the decision."""
        return self._verdict is not None

    def settle(self) -> bool | None:
        """Reads the device's decision: whether the last step was taken. None if none is pending. Waits for the
        device."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return None
        taken = verdict.read()
        # If it is not None, a later micro step has set it.
        if self.applied is None:
            self.applied = taken
        return taken

    def take(self, optimizer: Optimizer, schedule: LRScheduler | None, lr_kwargs: Mapping[str, Any]) -> None:
        """Steps `optimizer`, and then `schedule`, or skips both. Gradients are reduced already.

        Raises LossScaleError if the loss scale would fall below its minimum, UsageError if a parameter has a gradient
        that the optimizer does not have.
        """
        self._refuse_thawed()
        self.norm, self.divisor = self._clip(), None
        if self.skips and self.scaler is None and self._strategy.guard is None and _can_decide(optimizer):
            self._take_unread(optimizer, schedule, lr_kwargs, self.norm.isfinite())
            return
        # bool() waits for the device. The norm is over all ranks, so they decide alike.
        overflow = (self.skips or self._strategy.guard is not None) and not bool(self.norm.isfinite())
        if not overflow:
            self._strategy.step(optimizer)
        # Only after the step: `update` may change the scale, but these gradients were scaled by the old one.
        if self.scaler is not None:
            self.scaler.update(overflow, self._find_culprits() if overflow and self.scaler.exhausted else ())
        # Needed after an overflow too: it drops gradients and frees gathered weights.
        self._strategy.finish_step()
        if schedule is not None and not overflow:
            schedule.step(**lr_kwargs)
        self.applied = not overflow

    def _refuse_thawed(self) -> None:
        thawed = {name for name, tensor in self._frozen if tensor.requires_grad and tensor.grad is not None}
        if thawed:
            more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
            raise UsageError(
                f"the optimizer lacks parameters that have gradients: {min(thawed)}{more}; they were frozen when the"
                " engine was built",
                hint="build the engine while they are trainable, and freeze them afterwards, which keeps their values",
            )

    def _clip(self) -> Tensor:
        """Unscales and clips the gradients, and returns their norm before clipping (0-dim)."""
        # Dividing by a factor of 1 / ranks multiplies the mean over ranks by their number.
        scale = self.loss_scale / self._strategy.gradient_factor
        for watch in self._strategy.parts.gradient_watches:
            watch(scale if self.divisor is None else self.divisor * scale)
        if self._strategy.guard is None:
            return self._strategy.clip(self._limit, scale, self.divisor)
        # Clipping by a norm that is not finite would make all gradients so: find the culprits before.
        norm = self._strategy.clip(0.0, scale, self.divisor)
        if not bool(norm.isfinite()):
            self._strategy.guard(self._find_culprits())
            return norm
        # The first call has unscaled and divided already, so this one only clips.
        return self._strategy.clip(self._limit) if self._limit > 0 else norm

    def _take_unread(
        self, optimizer: Optimizer, schedule: LRScheduler | None, lr_kwargs: Mapping[str, Any], finite: Tensor
    ) -> None:
        """Takes a step that the device skips if gradients are not `finite`. The host learns of it at the next step."""
        self._verdict, self.applied = Verdict(optimizer, finite), None
        self._strategy.finish_step()
        if schedule is not None:
            self._verdict.step_schedule(schedule, lr_kwargs)

    def _find_culprits(self) -> list[str]:
        """Names of parameters whose gradients are not finite on some rank."""
        names = self._strategy.find_non_finite()
        if self._everyone.size == 1:
            return names
        found = all_gather(self._everyone, names)
        return [name for name in self._strategy.masters if any(name in names for names in found)]


def _can_decide(optimizer: Optimizer) -> bool:
    """Whether the device can skip a step, which then computes with the parameters themselves."""
    return find_kept(optimizer) is None and can_decide(optimizer)
