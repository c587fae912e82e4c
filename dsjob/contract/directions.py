"""Whether a lower or a higher value of a metric is better, as far as its name says so."""

from __future__ import annotations

from typing import Literal

Direction = Literal["min", "max"]
_FALLING = ("loss", "perplexity", "error")  # how names of metrics end whose lower values are better


def falls(metric: str) -> bool:
    """Whether a metric's name says that lower values are better: it ends in loss, perplexity or error, or it is a part
    of the loss, such as `eval/loss/contrastive`."""
    parts = metric.lower().split("/")
    return "loss" in parts or parts[-1].endswith(_FALLING)
