"""Tensors that a model may change in place, without copies of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsjob.torch_private import tree_flatten, tree_unflatten


class _Alias(torch.autograd.Function):
    """Returns its inputs as tensors that autograd treats neither as leaves nor as views of another function's output,
    so that they may be changed in place."""

    @staticmethod
    def forward(ctx: Any, enter: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.enter = enter
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.enter()
        return None, *gradients


def alias(value: Any, chosen: Callable[[Tensor], bool], enter: Callable[[], None] = lambda: None) -> Any:
    """A nested value whose chosen tensors are safe to change in place. Gradients flow through them.

    enter: called once in each backward pass through any of them.
    """
    leaves, form = tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and chosen(leaf)]
    if not places:
        return value
    given: tuple[Tensor, ...] = _Alias.apply(enter, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, given, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, form)
