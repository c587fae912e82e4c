"""Adam, AdamW, Lion, Adagrad and Lamb on the host, each in one pass over memory: C++ for AVX2, AVX-512 and any other
processor.

Every function takes lists of contiguous fp32 tensors on the CPU, one entry per parameter, and changes them in place.
`gradients` may also be bf16 or fp16. They are multiplied by `gradient_factor` first (1 / loss scale, times the factor
of clipping), and are not changed. `copies` is empty, or has a bf16 or fp16 tensor per parameter that receives the new
weights. The arithmetic is fp32. The result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsjob.ops.loading import load

Tensors = Sequence[Tensor]
_tell_autograd = torch.autograd.graph.increment_version  # else it would miss that weights saved by a pass have changed


def find_problem() -> str:
    """Makes the functions below callable. Returns why they cannot be, or nothing."""
    problem: str = load("cpu_optimizers")
    return problem


def adam_(
    weights: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    steps: Sequence[float],
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    gradient_factor: float = 1.0,
    copies: Tensors = (),
) -> None:
    """Kingma and Ba 2015; with `decoupled`, Loshchilov and Hutter 2019. steps: of each parameter, with this one."""
    torch.ops.dsjob.cpu_adam_(
        *(weights, gradients, averages, squares, copies, steps),
        *(rate, *betas, eps, decay, decoupled, bias_correction, gradient_factor),
    )
    _tell_autograd([*weights, *copies])


def lion_(
    weights: Tensors,
    gradients: Tensors,
    averages: Tensors,
    *,
    rate: float,
    betas: tuple[float, float],
    decay: float,
    gradient_factor: float = 1.0,
    copies: Tensors = (),
) -> None:
    """Chen et al. 2023. An element whose averaged gradient is 0 only decays."""
    torch.ops.dsjob.cpu_lion_(weights, gradients, averages, copies, rate, *betas, decay, gradient_factor)
    _tell_autograd([*weights, *copies])


def adagrad_(
    weights: Tensors,
    gradients: Tensors,
    sums: Tensors,
    rates: Sequence[float],
    *,
    eps: float,
    decay: float,
    gradient_factor: float = 1.0,
    copies: Tensors = (),
) -> None:
    """Duchi et al. 2011. rates: of each parameter, since they may decay with its steps."""
    torch.ops.dsjob.cpu_adagrad_(weights, gradients, sums, copies, rates, eps, decay, gradient_factor)
    _tell_autograd([*weights, *copies])


def lamb_average_(
    weights: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    *,
    betas: tuple[float, float],
    eps: float,
    eps_inside_root: bool,
    decay: float,
    gradient_factor: float = 1.0,
) -> Tensor:
    """The first half of a step of Lamb: moves the averages.

    Returns fp64 [parameters, 2]: the sums of squares of the weights, and of their updates. With them, the caller
    computes the rate of each parameter for `lamb_apply_`.
    """
    result: Tensor = torch.ops.dsjob.cpu_lamb_average_(
        weights, gradients, averages, squares, *betas, eps, eps_inside_root, decay, gradient_factor
    )
    return result


def lamb_apply_(
    weights: Tensors,
    averages: Tensors,
    squares: Tensors,
    rates: Sequence[float],
    *,
    eps: float,
    eps_inside_root: bool,
    decay: float,
    copies: Tensors = (),
) -> None:
    """The second half: subtracts `rates` times the updates."""
    torch.ops.dsjob.cpu_lamb_apply_(weights, averages, squares, copies, rates, eps, eps_inside_root, decay)
    _tell_autograd([*weights, *copies])
