"""Running a function so that what autograd would keep of it is computed again in the backward pass.

On torch.utils.checkpoint without reentrant autograd, which keeps random numbers and autocast as they were, and asks
nothing of the inputs. This module adds how inputs are kept (`Store`), which operators are not computed again, and the
tracked random states.

Without reentrance DDP counts each parameter once, and results are the same bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dsjob.compute.activation.rng import TRACKER, go_back_to
from dsjob.compute.activation.stores import Store
from dsjob.compute.activation.timing import run_timed

# Matrix products, convolutions and attention, by operator: most of the time of a block, and little of its memory.
_COSTLY = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps",
    }
)


def is_costly(operator: Any) -> bool:
    """Whether the results of an operator (torch._ops.OpOverload) are kept under `mode: selective`."""
    return operator.namespace == "aten" and operator.overloadpacket.__name__ in _COSTLY


def choose_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `mode: selective`, as torch.utils.checkpoint asks for it."""
    return CheckpointPolicy.MUST_SAVE if is_costly(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed:
    """A module's `forward` whose activations are computed again; put in its place, it changes no name.

    A class and not a closure: a copy of the module then has one that belongs to the copy.
    """

    def __init__(self, forward: Callable[..., Any], *, store: Store, selective: bool = False) -> None:
        functools.update_wrapper(self, forward, updated=())
        self.forward, self.store, self.selective = forward, store, selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute(self.forward, args, kwargs, store=self.store, selective=self.selective)


def recompute(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    store: Store,
    selective: bool = False,
) -> Any:
    """What `function` returns for the arguments, which `store` keeps until the backward pass calls it again.

    `selective`: results of costly operators are kept too. Without gradients it is a plain call.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    run = functools.partial(_run, store=store, selective=selective)
    section = store.section
    if section.profile or section.synchronize_checkpoint_boundary:
        return run_timed(run, function, args, kwargs, section)
    return run(function, args, kwargs)


def _run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, store: Store, selective: bool
) -> Any:
    contexts = functools.partial(_make_contexts, selective)
    if not store.changes_anything:
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    # Flat, since torch hands over tensors among the positional arguments alone.
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))

    def call(*leaves: Any) -> Any:
        again, named = tree_unflatten(leaves, tree)
        return function(*again, **named)

    with saved_tensors_hooks(store.pack, store.unpack):
        return checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)


def _make_contexts(selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first run and of the second."""
    first, second = nullcontext(), nullcontext()
    if selective:
        first, second = create_selective_checkpoint_contexts(choose_policy)  # type: ignore[no-untyped-call]
    return (first, _nest(second, go_back_to(TRACKER.get_states()))) if TRACKER.states_ else (first, second)


@contextmanager
def _nest(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
