"""Backward passes that the program starts itself: what a gradient passes on its way into a model.

`engine.backward(loss)` divides and scales the loss. A program may call `loss.backward()` instead, of a loss over the
outputs of several engines perhaps: then the gradients of the outputs are divided where they enter each model.

Outputs are handed out as views, and the hook sits on the view: a loss that the model computed from another output must
not be divided twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_map

_engine_drives = False  # one backward pass at a time, whatever the thread that autograd runs it on


@contextmanager
def drive() -> Iterator[None]:
    """While an engine runs the backward pass: it has divided and scaled the loss itself."""
    global _engine_drives
    before, _engine_drives = _engine_drives, True
    try:
        yield
    finally:
        _engine_drives = before


def watch_outputs(outputs: Any, enter: Callable[[Tensor], Tensor]) -> Any:
    """`outputs` (tensors in dicts, lists, tuples, dataclasses) that pass their gradients through `enter`.

    Each is a view of its own: a loss that the model has computed from another output does not pass it twice. `enter`
    is not called for backward passes of an engine, nor inside torch.func, where gradients are a function's and not a
    step's.
    """

    def hook(gradient: Tensor) -> Tensor:
        return gradient if _engine_drives else enter(gradient)

    def watch(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad and not is_functorch_wrapped_tensor(value):
            view = value.view_as(value)
            view.register_hook(hook)  # type: ignore[no-untyped-call]
            return view
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: watch_all(getattr(value, name)) for name in names})
        return value

    def watch_all(value: Any) -> Any:
        return tree_map(watch, value)

    return watch_all(outputs)
