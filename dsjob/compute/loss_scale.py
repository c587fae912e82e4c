"""The loss scale of fp16, and how it reacts to overflows.

This is arithmetic only; the engine detects overflows and skips steps.

All stages use the same scaler, so the stage does not change any number. (DeepSpeed's stage 0 ignores the config's
hysteresis, and continues at the minimum scale, where dsjob stops.) A step is unscaled by the scale of its own backward
pass; DeepSpeed uses the new scale if it has just doubled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsjob.contract.precisions import Fp16
from dsjob.errors import LossScaleError


class LossScaler:
    """A static or dynamic loss scale that follows DeepSpeed's rules (`runtime/fp16/loss_scaler.py` of 0.19.6).

    A dynamic scale starts at 2^initial_scale_power. It doubles after `loss_scale_window` good steps in a row (not
    counting the first step). The first `hysteresis` - 1 overflows are tolerated; each further one halves the scale. The
    tolerance is restored when the scale doubles, or with `consecutive_hysteresis`, at each good step.
    """

    def __init__(self, spec: Fp16) -> None:
        self._spec = spec
        self.dynamic = spec.loss_scale == 0
        self.scale = float(2**spec.initial_scale_power if self.dynamic else spec.loss_scale)
        # _borne counts down from `hysteresis`: at 1, the next overflow lowers the scale.
        self._step, self._last_overflow, self._borne = 0, -1, spec.hysteresis
        self._skipped = 0

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot be lowered at the next overflow."""
        return self.dynamic and self._borne == 1 and self.scale <= self._spec.min_loss_scale

    def update(self, overflow: bool, culprits: Sequence[str] = ()) -> None:
        """Records one step. Raises LossScaleError if a dynamic scale would fall below its minimum.

        culprits: names of parameters whose gradients overflowed, for the message.
        """
        if overflow and self.exhausted:
            raise LossScaleError(
                f"gradients overflowed fp16 at the smallest loss scale, {self.scale:g}{_list(culprits)}",
                hint="use bf16.enabled=true, which has the range of fp32 and needs no loss scale, or lower the learning"
                " rate",
            )
        if self.dynamic:
            self._adapt(overflow)
        self._skipped += overflow
        self._step += 1

    def _adapt(self, overflow: bool) -> None:
        if overflow:
            if self._borne == 1:
                self.scale = max(self.scale / 2, float(self._spec.min_loss_scale))
            else:
                self._borne -= 1
            self._last_overflow = self._step
            return
        # The number of good steps since the last overflow, without this one. `_last_overflow` starts at -1, so this is
        # 0 in the first step of a run, which therefore never doubles the scale.
        good = self._step - self._last_overflow - 1
        grows = good > 0 and good % self._spec.loss_scale_window == 0
        if grows:
            self.scale *= 2
        if grows or self._spec.consecutive_hysteresis:
            self._borne = self._spec.hysteresis

    def state(self) -> dict[str, Any]:
        """The state for checkpoints, as JSON values. They are exact: a scale is a float with few digits."""
        return {
            "scale": self.scale,
            "dynamic": self.dynamic,
            "skipped": self._skipped,  # not used here (the engine counts skipped steps), but expected by old versions
            "step": self._step,
            "last_overflow": self._last_overflow,
            "borne": self._borne,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state. A static scale always comes from the document."""
        self._skipped = state.get("skipped", self._skipped)
        # A state saved by the other kind of scale has nothing to continue from.
        if self.dynamic and state["dynamic"]:
            self.scale, self._step = state["scale"], state["step"]
            self._last_overflow = state["last_overflow"]
            # The document may have lowered `hysteresis` since the save.
            self._borne = min(state["borne"], self._spec.hysteresis)


def _list(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f", in {', '.join(names[:5])}{more}"
