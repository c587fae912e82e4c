"""Muon: orthogonalises the momentum of weight matrices before adding it. Other parameters use Adam."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dsjob.optim.partwise import PartwiseOptimizer, move_averages
from dsjob.optim.shards import gather, local, own_part
from dsjob.ranks.splits import find_split

# The coefficients of x -> a x + b x^3 + c x^5 (Jordan et al. 2024). Applied five times to the singular values, it
# brings any value in (0, 1] to between about 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS, _RESTART = 5, 2


class MuonWithAuxAdam(PartwiseOptimizer):
    """Follows DeepSpeed's class of the same name (deepspeed/runtime/zero/muon, version 0.19). Groups set `use_muon`.

    With the gradient g, the momentum m and the weights w, Muon computes:

    - m = lerp(m, g, 1 - momentum); d = lerp(g, m, momentum)
    - w = (1 - lr weight_decay) w - lr s orthogonal(d), with s = sqrt(max(1, rows / columns))

    A tensor with four dimensions is flattened to a matrix with its first dimension as rows; others are stacks of
    matrices. If d is sharded, every rank gathers it, works on whole matrices and keeps its own part. Other groups use
    Adam with decoupled weight decay. `lr` and `adam_lr` apply to groups without a rate of their own.

    State of a parameter: `momentum_buffer`; or with Adam, `exp_avg`, `exp_avg_sq` and `step` (fp32, shape []).
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
            raise ValueError("use_muon: parameters need at least two dimensions")
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
        # Only this rank's parts: decay is elementwise, so it needs no communication.
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
        split = find_split(parameter)
        direction = gather(gradient.lerp(average, group["momentum"]))
        direction = direction if split is None else split.gather(direction)
        matrix = direction.flatten(1) if direction.ndim == 4 else direction
        made = orthogonalize(matrix, group["ns_method"]).view_as(direction).to(parameter.dtype)
        # The entries of an orthogonal [n, m] matrix are about 1 / sqrt(max(n, m)). This scale makes them 1 / sqrt(m)
        # for tall matrices too, so updates do not depend on the number of rows.
        scale = math.sqrt(max(1.0, direction.size(-2) / direction.size(-1)))
        # Every rank has computed all of `made`, so taking the own part needs no communication either.
        local(parameter).sub_(own_part(made, parameter, split), alpha=group["lr"] * scale)

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
    """Splits each group (or a list of parameters, as one group) into parameters for Muon and parameters for Adam.

    names: of parameters, by id. As in DeepSpeed, Muon takes parameters with at least two dimensions whose name contains
    neither `embed` nor `lm_head`. Parameters with unknown names go to Adam.
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
    """Brings the singular values of `matrix` ([..., n, m]) close to 1 with five Newton-Schulz steps.

    method: `gram` iterates on the smaller of x x^T and x^T x if the matrix is not square; the result is the same up to
    rounding. dtype: of the computation and the result. By default half precision on a GPU, as in DeepSpeed (fp16 for
    `gram`, otherwise bf16), and fp32 elsewhere.
    """
    if dtype is None:
        half = torch.float16 if method == "gram" else torch.bfloat16
        dtype = half if matrix.is_cuda else torch.float32
    x = matrix.float()
    # The iteration works on x x^T, so the smaller side goes first: [n, m] with n <= m.
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    # Scale before rounding: gradients may be too small or too large for fp16.
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)).to(dtype)
    if method == "gram" and x.size(-2) < x.size(-1):
        # Recompute x x^T after a few steps, because its rounding errors grow with each step.
        x = _iterate_on_gram(_iterate_on_gram(x, _RESTART), _STEPS - _RESTART)
    else:
        for _ in range(_STEPS):
            gram = x @ x.mT  # [..., n, n]; then x <- a x + b (x x^T) x + c (x x^T)^2 x
            x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def _iterate_on_gram(x: Tensor, steps: int) -> Tensor:
    """`steps` of the iteration, computed on x x^T ([..., n, n]), and applied to x ([..., n, m]) at the end."""
    gram, product = x @ x.mT, None
    for step in range(steps):
        factor = _B * gram + _C * gram @ gram
        factor.diagonal(dim1=-2, dim2=-1).add_(_A)
        product = factor if product is None else factor @ product
        # The new x is factor @ x, and factor is symmetric, so the new x x^T is factor @ gram @ factor.
        if step < steps - 1:
            gram = factor @ gram @ factor
    return x if product is None else product @ x
