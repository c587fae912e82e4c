"""`deepspeed.moe.utils`: which parameters are an expert's, and groups of an optimizer without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsjob.errors import UsageError


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is marked as an expert's, by `allreduce = False`."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The groups, as a list. Raises UsageError where a parameter is an expert's. `max_group_size` is theirs alone."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(param) for param in group["params"]):
            raise UsageError(
                f"group {group.get('name', '')!r} has parameters of experts, which dsjob does not have",
                hint="train without experts, or with DeepSpeed",
            )
    return groups
