"""Logits that are computed only if something other than a cross entropy uses them.

While `deferring` runs, a model's last linear layer returns `DeferredLogits`. They remember the layer and its inputs.
`torch.nn.functional.cross_entropy` then calls `linear_cross_entropy`, which never holds all logits. Any other use
computes them as usual. The layer is called either way, so FSDP2's hooks gather its weight, whatever unit holds it.

Deferred logits are no tensors: hooks of FSDP2 and DDP that look for tensors in a model's output pass them by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.errors import ContractError
from dsjob.ops.linear_cross_entropy import linear_cross_entropy
from dsjob.torch_private import list_forward_hooks, replace_child, tree_map_only


class Head:
    """The last linear layer of a model. fewest: logits of a call from which on they are deferred.

    deferred: the logits of the last call that deferred them; 0 before. refused: called when something else uses
    deferred logits.
    """

    def __init__(self, model: nn.Module, layer: nn.Linear, fewest: int, refused: Callable[[], None]) -> None:
        found = [(owner, key) for owner in model.modules() for key, own in owner.named_children() if own is layer]
        (self._owner, self._key), *_ = found
        self.layer, self.fewest, self.deferred, self._refused = layer, fewest, 0, refused
        self._valid = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defers the logits of calls inside. Outside, logits that are still deferred are lost: weights may change."""
        replace_child(self._owner, self._key, _StandIn(self))
        self._valid = True
        try:
            yield
        finally:
            replace_child(self._owner, self._key, self.layer)
            self._valid = False

    def defers(self, hidden: Tensor) -> bool:
        """Whether to defer the logits of these inputs."""
        logits = hidden.numel() // max(hidden.shape[-1], 1) * self.layer.out_features
        if logits < self.fewest or not torch.is_grad_enabled():
            return False
        sources = [str(getattr(hook, "__module__", "")) for hook in list_forward_hooks(self.layer)]
        if all(source.startswith(("torch.", "dsjob.")) for source in sources):
            return True
        self._refused()  # a hook of the user's expects logits
        return False

    def compute(self, hidden: Tensor) -> Tensor:
        """The logits."""
        if not self._valid:
            raise ContractError(
                "the model's logits are used after its loss was computed without them",
                hint="set ops.linear_cross_entropy=off",
            )
        self._refused()
        logits: Tensor = self.layer(hidden)
        return logits

    def compute_loss(self, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The loss of inputs [rows, features]. Inside the layer's call, where its weight is whole."""
        layer = self.layer
        vars(layer)["forward"] = lambda inputs: linear_cross_entropy(
            inputs, layer.weight, target, layer.bias, **options
        )
        try:
            loss: Tensor = layer(hidden)
        finally:
            del vars(layer)["forward"]
        self.deferred = len(hidden) * layer.out_features
        return loss


class _StandIn:
    """Takes the place of the layer among its owner's modules; anything but a call reaches the layer."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Any:
        return DeferredLogits(self._head, hidden) if self._head.defers(hidden) else self._head.layer(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head.layer, name)


class DeferredLogits:
    """The logits of `hidden` [..., features]. widened: in fp32, as after `.float()`."""

    def __init__(self, head: Head, hidden: Tensor, widened: bool = False) -> None:
        self._head, self._hidden, self._widened = head, hidden, widened
        self._whole: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.layer.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._hidden.dim()

    def float(self) -> DeferredLogits:
        return DeferredLogits(self._head, self._hidden, widened=True)

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> Any:
        if shape == (-1, self._head.layer.out_features):
            return DeferredLogits(self._head, self._hidden.reshape(-1, self._hidden.shape[-1]), self._widened)
        return self.compute().view(*shape)

    reshape = view

    def compute(self) -> Tensor:
        """The tensor."""
        if self._whole is None:
            logits = self._head.compute(self._hidden)
            self._whole = logits.float() if self._widened else logits
        return self._whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.cross_entropy:
            loss = _find_loss(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        args, kwargs = tree_map_only(cls, lambda logits: logits.compute(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def _loss(self, target: Tensor, **options: Any) -> Tensor | None:
        fits = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
        if not fits or self.dim() != 2 or len(target) != len(self._hidden) or target.device != self.device:
            return None
        return self._head.compute_loss(self._hidden, target, **options)


def _find_loss(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The result of `torch.nn.functional.cross_entropy` for these arguments; None if it needs the logits."""
    if not isinstance(logits, DeferredLogits) or weight is not None or size_average is not None or reduce is not None:
        return None
    return logits._loss(target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


def _forward_operators() -> None:
    """Gives DeferredLogits the operators of tensors. Python looks these up in the class, not with __getattr__."""
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    names = ["getitem", "setitem", "len", "iter", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"]
    for name in (*names, *arithmetic, *(f"r{name}" for name in arithmetic)):
        full = f"__{name}__"

        def call(self: DeferredLogits, *args: Any, _name: str = full) -> Any:
            return getattr(self.compute(), _name)(*args)

        setattr(DeferredLogits, full, call)
    DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


_forward_operators()
