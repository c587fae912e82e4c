"""Muon: momentum whose matrices are made orthogonal before they are added; Adam for all that is no layer's matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dsjob.optim.partwise import PartwiseOptimizer, move_averages
from dsjob.optim.shards import gather, local, own_part

# Of the quintic iteration x -> a x + b x^3 + c x^5 on singular values (Jordan et al. 2024), five times: they end up
# between about 0.7 and 1.2, from wherever in (0, 1] they began.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS, _RESTART = 5, 2


class MuonWithAuxAdam(PartwiseOptimizer):
    """As DeepSpeed's class of that name (deepspeed/runtime/zero/muon, version 0.19): groups say `use_muon`.

    Muon: m = lerp(m, g, 1 - momentum), d = lerp(g, m, momentum), w = (1 - lr weight_decay) w - lr s orthogonal(d) with
    s = sqrt(max(1, rows / columns)). Tensors of four dimensions are matrices of their first; others are stacks of
    matrices. d is gathered where it is sharded, so that every rank works on whole matrices and keeps its own part.
    The rest is stepped by Adam with decoupled weight decay. `lr` and `adam_lr` are those of groups without their own.

    State of a parameter: `momentum_buffer`, or `exp_avg`, `exp_avg_sq` and `step` (fp32 []).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        ns_method: str = "gram",
        adam_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        params = list(params)
        if any(group["use_muon"] and any(p.ndim < 2 for p in group["params"]) for group in params):
            raise ValueError("use_muon: parameters of fewer than two dimensions are no matrices")
        groups = [{**group, "lr": group.get("lr", lr if group["use_muon"] else adam_lr)} for group in params]
        defaults = {
            "lr": lr,
            "use_muon": True,
            "momentum": momentum,
            "ns_method": ns_method,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(groups, defaults)

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        torch._foreach_mul_([local(parameter) for parameter in parameters], 1 - group["lr"] * group["weight_decay"])
        if not group["use_muon"]:
            self._update_by_adam(parameters, group)
            return
        for parameter in parameters:
            self._update_by_muon(parameter, group)

    def _update_by_muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], cast(Tensor, parameter.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        # Whole on every rank, [n, m] or [..., n, m]: singular values cannot be computed from a shard.
        direction = gather(gradient.lerp(average, group["momentum"]))
        matrix = direction.flatten(1) if direction.ndim == 4 else direction
        made = orthogonalize(matrix, group["ns_method"]).view_as(direction).to(parameter.dtype)
        # An orthogonal [n, m] has entries of about 1 / sqrt(max(n, m)); with this, 1 / sqrt(m) for tall and wide ones
        # alike.
        scale = math.sqrt(max(1.0, direction.size(-2) / direction.size(-1)))
        local(parameter).sub_(own_part(made, parameter), alpha=group["lr"] * scale)

    def _update_by_adam(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        averages, squares, steps = move_averages(states, parameters, group["betas"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        rates = [-group["lr"] / (1 - beta1**step) for step in steps]
        torch._foreach_addcdiv_([local(parameter) for parameter in parameters], averages, roots, rates)


def split_matrices(groups: list[Any], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Each of `groups` (or of plain parameters, one group) in two: what Muon steps, and what is left to Adam.

    `names`: of parameters, by id. Muon's are those of two dimensions and more whose name has neither `embed` nor
    `lm_head` in it, as in DeepSpeed. One whose name is not known may be either, and is left to Adam.
    """
    given = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    split: list[dict[str, Any]] = []
    for group in given:
        if "use_muon" in group:
            split.append(group)
            continue
        for use_muon in (True, False):
            chosen = [p for p in group["params"] if _is_matrix(p, names.get(id(p))) == use_muon]
            if chosen:
                split.append({**group, "params": chosen, "use_muon": use_muon})
    return split


def _is_matrix(parameter: nn.Parameter, name: str | None) -> bool:
    return parameter.ndim >= 2 and name is not None and not any(part in name.lower() for part in ("embed", "lm_head"))


def orthogonalize(matrix: Tensor, method: str = "gram", dtype: torch.dtype | None = None) -> Tensor:
    """`matrix` ([..., n, m]) with its singular values brought near 1: five Newton-Schulz steps.

    `gram` iterates on the small square of a matrix that is not square, with the same result but for rounding. `dtype`:
    of the work and the result; where None, half precision on a GPU, as in DeepSpeed (bf16, and fp16 for `gram`), and
    fp32 elsewhere.
    """
    if dtype is None:
        half = torch.float16 if method == "gram" else torch.bfloat16
        dtype = half if matrix.is_cuda else torch.float32
    x = matrix.float()
    # The iteration works on x x^T, so the smaller side goes first: [n, m] with n <= m.
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    # Scaled before it is rounded: gradients may be too small or too large for fp16.
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)).to(dtype)
    if method == "gram" and x.size(-2) < x.size(-1):
        # x x^T is computed anew after a few steps: rounding errors of the small square grow with each.
        x = _iterate_on_gram(_iterate_on_gram(x, _RESTART), _STEPS - _RESTART)
    else:
        for _ in range(_STEPS):
            gram = x @ x.mT
            x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def _iterate_on_gram(x: Tensor, steps: int) -> Tensor:
    """`steps` of the iteration, carried out on x x^T and multiplied by x at the end."""
    gram, product = x @ x.mT, None
    for step in range(steps):
        factor = _B * gram + _C * gram @ gram
        factor.diagonal(dim1=-2, dim2=-1).add_(_A)
        product = factor if product is None else factor @ product
        if step < steps - 1:
            gram = factor @ gram @ factor
    return x if product is None else product @ x
