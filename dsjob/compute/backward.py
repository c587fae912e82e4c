"""Supports backward passes that the program starts itself with `loss.backward()`.

`engine.backward(loss)` divides and scales the loss. With `loss.backward()` (of a loss over several engines, perhaps),
the gradients of a model's outputs are divided and scaled instead, where they enter the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dsjob.torch_private import is_functorch_wrapped_tensor, tree_map

_engine_drives = False  # a global, because autograd may run hooks in other threads; only one backward pass runs at once


@contextmanager
def drive() -> Iterator[None]:
    """Use it while an engine runs a backward pass: the engine has divided and scaled the loss, so hooks do nothing."""
    global _engine_drives
    # Restored rather than reset, so that uses may be nested.
    before, _engine_drives = _engine_drives, True
    try:
        yield
    finally:
        _engine_drives = before


def watch_outputs(outputs: Any, enter: Callable[[Tensor], Tensor]) -> Any:
    """Makes the gradients of `outputs` (tensors in dicts, lists, tuples, dataclasses) pass through `enter`.

    Each output becomes a view, so the gradient of a loss that the model computed from another output passes only once.
    `enter` is not called in backward passes of an engine, nor inside torch.func, whose gradients belong to no step.
    """

    def hook(gradient: Tensor) -> Tensor:
        return gradient if _engine_drives else enter(gradient)

    def watch(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad and not is_functorch_wrapped_tensor(value):
            # The hook is on a view. On `value` itself, it would also see the gradient of a loss that the model computed
            # from this output, and divide it twice.
            view = value.view_as(value)
            view.register_hook(hook)  # type: ignore[no-untyped-call]
            return view
        # `tree_map` enters dicts, lists and tuples, but not dataclasses.
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: watch_all(getattr(value, name)) for name in names})
        return value

    def watch_all(value: Any) -> Any:
        return tree_map(watch, value)

    return watch_all(outputs)
