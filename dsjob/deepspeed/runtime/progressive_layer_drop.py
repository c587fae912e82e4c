"""`deepspeed.runtime.progressive_layer_drop`: how many layers a model keeps while it trains."""

from __future__ import annotations

import math
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names


class ProgressiveLayerDrop:
    """The share of layers to keep: 1 at first, then (1 - theta) exp(-gamma step) + theta.

    Zhang and He 2020, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping". The
    model drops the layers: its `forward` gets the keyword arguments of `get_state` in training.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments `progressive_layer_drop` (True) and `pld_theta` (the share)."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """The share now."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Sets the share to that of a step."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


__getattr__ = _explain_names(__name__)
