"""Backward passes that leave out the gradients of weights, which are computed later.

In a pipeline, nobody waits for these gradients, so they can fill the time in which a stage would wait. Only linear
layers (`F.linear`, and `torch.addmm` as transformers' Conv1D calls it) do this: they have nearly all of the arithmetic.
Other parameters get their gradients in the backward pass as usual. Hooks on the gradients of these weights do not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class _Product(NamedTuple):
    """What the gradient of a weight is computed from. inputs: [rows, in]. gradients: of the outputs, [rows, out].
    transposed: whether the weight is [in, out] instead of [out, in]."""

    weight: Tensor
    inputs: Tensor
    gradients: Tensor
    transposed: bool


class Later:
    """The gradients of weights that one backward pass has left out."""

    def __init__(self) -> None:
        self._products: list[_Product] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within, linear layers leave the gradients of their weights to `run`. Also needed in the backward pass, for
        layers that it recomputes."""
        with _Deferring(self):
            yield

    def add(self, product: _Product) -> None:
        """Notes a gradient that was left out."""
        self._products.append(product)

    @torch.no_grad()
    def run(self) -> None:
        """Adds the gradients to those of the weights."""
        products, self._products = self._products, []
        while products:
            weight, inputs, gradients, transposed = products.pop()
            left, right = (inputs, gradients) if transposed else (gradients, inputs)
            right = right.to(left.dtype)
            if weight.grad is not None and weight.grad.dtype == left.dtype:
                weight.grad.addmm_(left.t(), right)
                continue
            found = (left.t() @ right).to(weight.dtype)
            weight.grad = found if weight.grad is None else weight.grad + found


class _Deferring(TorchFunctionMode):
    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.is_grad_enabled() and not given:
            if function is F.linear and _is_leaf(args[1]):
                inputs, weight, *rest = args
                return _Linear.apply(inputs, weight, rest[0] if rest else None, self._later, False)  # type: ignore[no-untyped-call]
            if function is torch.addmm and _is_leaf(args[2]) and args[0].dim() == 1:
                bias, inputs, weight = args
                return _Linear.apply(inputs, weight, bias, self._later, True)  # type: ignore[no-untyped-call]
        return function(*args, **given)


def _is_leaf(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf and type(weight) is nn.Parameter


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, later: Later, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.later, ctx.transposed, ctx.bias_dtype = later, transposed, bias.dtype if bias is not None else None
        return torch.addmm(bias, inputs, weight) if transposed else F.linear(inputs, weight, bias)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.later.add(_Product(weight, inputs.reshape(-1, inputs.shape[-1]), rows, ctx.transposed))
        to_inputs = to_bias = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(gradient.dtype)
            to_inputs = (gradient @ (matrix.t() if ctx.transposed else matrix)).to(inputs.dtype)
        if ctx.needs_input_grad[2]:
            to_bias = rows.sum(0).to(ctx.bias_dtype)
        return to_inputs, None, to_bias, None, None
