"""Where a tensor passes from layers that all ranks compute alike to layers that are divided, and back.

Each function has the collective of the forward pass, and a backward pass with the matching one. `ranks`: those along
the `tensor` axis. Dimensions are divided as in `ranks.splits.cut`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.ranks.mesh import Ranks
from dsjob.ranks.splits import Split, cut
from dsjob.torch_private import count_changes

_ENTERED = "_dsjob_entered"


def enter(x: Tensor, ranks: Ranks) -> Tensor:
    """`x`, whose gradient is the sum of those that the ranks compute with their parts of the layer.

    Layers with the same input share one sum.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    known = getattr(x, _ENTERED, None)
    if known is not None and known[0] is ranks and known[1] == count_changes(x):
        return cast(Tensor, known[2])
    made: Tensor = _Enter.apply(x, ranks)  # type: ignore[no-untyped-call]
    setattr(x, _ENTERED, (ranks, count_changes(x), made))
    return made


def add_up(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of the ranks' `x`, on all of them."""
    return cast(Tensor, _AddUp.apply(x, ranks))  # type: ignore[no-untyped-call]


def gather(x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
    """The ranks' `x` side by side along `dim`, which then has `length` indices. All ranks go on with it alike."""
    return cast(Tensor, _Gather.apply(x, dim % x.dim(), length, ranks, False))  # type: ignore[no-untyped-call]


def take_part(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part of `x` along `dim`. The gradients of all parts are put together."""
    return cast(Tensor, _TakePart.apply(x, dim % x.dim(), ranks))  # type: ignore[no-untyped-call]


def gather_and_enter(x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
    """Like `gather`, for layers that are divided: the gradients of all ranks are added up."""
    return cast(Tensor, _Gather.apply(x, dim % x.dim(), length, ranks, True))  # type: ignore[no-untyped-call]


def add_up_parts(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part, along `dim`, of the sum of the ranks' `x`."""
    return cast(Tensor, _AddUpParts.apply(x, dim % x.dim(), ranks))  # type: ignore[no-untyped-call]


def _sum(x: Tensor, ranks: Ranks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks.group)
    return total


def _join(x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
    return Split(dim, length, ranks).gather(x)


def _own(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    start, stop = cut(x.shape[dim], ranks.size, ranks.rank)
    return x.narrow(dim, start, stop - start).contiguous()


def _sum_own(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part of the sum of the ranks' `x`."""
    if x.shape[dim] % ranks.size or x.device.type == "cpu":  # gloo has no reduce-scatter of its own
        return _own(_sum(x, ranks), dim, ranks)
    sent = torch.cat(x.chunk(ranks.size, dim), 0).contiguous() if dim else x.contiguous()
    own = sent.new_empty((sent.shape[0] // ranks.size, *sent.shape[1:]))
    dist.reduce_scatter_tensor(own, sent, group=ranks.group)
    return own


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        # Not a view: `x` keeps what is returned, and a view would keep `x`, so that neither was ever freed.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.ranks), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return _sum(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, ranks: Ranks, divided: bool) -> Tensor:
        ctx.how = dim, ranks, divided
        return _join(x, dim, length, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, ranks, divided = ctx.how
        return (_sum_own if divided else _own)(gradient, dim, ranks), None, None, None, None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.how = dim, x.shape[dim], ranks
        return _own(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _join(gradient, *ctx.how), None, None


class _AddUpParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.how = dim, x.shape[dim], ranks
        return _sum_own(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _join(gradient, *ctx.how), None, None
