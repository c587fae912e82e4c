"""Lamb over a list of parameters on a GPU, as CUDA kernels: two passes over memory, whatever the number of parameters.

Between them, the caller turns sums of squares into the ratio of each parameter, on the GPU. Tensors are fp32,
contiguous and on one GPU, one entry per parameter. Results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsjob.ops.loading import load

Tensors = Sequence[Tensor]

torch.library.define(
    "dsjob::lamb_average_",
    "(Tensor[] weights, Tensor[] gradients, Tensor(a!)[] averages, Tensor(b!)[] squares, float beta1, float beta2, "
    "float eps, bool eps_inside_root, float decay) -> Tensor",
)
torch.library.define(
    "dsjob::lamb_apply_",
    "(Tensor(a!)[] weights, Tensor[] averages, Tensor[] squares, Tensor ratios, float[] rates, float eps, "
    "bool eps_inside_root, float decay) -> ()",
)


def find_problem(*, build: bool) -> str:
    """Makes the functions below callable on GPUs. Returns why they are not, or nothing.

    build: also compile them. They have not run on a GPU yet, so nothing does so without being asked.
    """
    problem: str = load("lamb", build=build)
    return problem


def average_(
    weights: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    *,
    betas: tuple[float, float],
    eps: float,
    eps_inside_root: bool,
    decay: float,
) -> Tensor:
    """The first half of a step: moves the averages.

    Returns fp32 [parameters, 2]: the sums of squares of the weights, and of their updates.
    """
    totals: Tensor = torch.ops.dsjob.lamb_average_(
        weights, gradients, averages, squares, *betas, eps, eps_inside_root, decay
    )
    return totals


def apply_(
    weights: Tensors,
    averages: Tensors,
    squares: Tensors,
    ratios: Tensor,
    rates: Sequence[float],
    *,
    eps: float,
    eps_inside_root: bool,
    decay: float,
) -> None:
    """The second half: subtracts each update, times its ratio (fp32 [parameters], on the GPU) and its rate."""
    torch.ops.dsjob.lamb_apply_(weights, averages, squares, ratios, rates, eps, eps_inside_root, decay)
    torch.autograd.graph.increment_version(weights)


def _fake_average(weights: Tensors, *others: object) -> Tensor:
    return weights[0].new_empty(len(weights), 2)


def _fake_apply(*others: object) -> None:
    return None


torch.library.register_fake("dsjob::lamb_average_", _fake_average)
torch.library.register_fake("dsjob::lamb_apply_", _fake_apply)
