"""`deepspeed.moe.utils`: detects the parameters of experts, which dsjob does not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.errors import UsageError


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert: DeepSpeed marks these with `allreduce = False`."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Returns the groups as a list. Raises UsageError if a parameter belongs to an expert.

    `max_group_size` has no effect, because it only applies to groups of experts.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(param) for param in group["params"]):
            raise UsageError(
                f"group {group.get('name', '')!r} contains parameters of experts, which dsjob does not support",
                hint="train without experts, or with DeepSpeed",
            )
    return groups


__getattr__ = _explain_names(__name__)
