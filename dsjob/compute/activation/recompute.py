"""Runs a function without keeping its activations, and recomputes them in the backward pass.

Built on torch.utils.checkpoint with use_reentrant=False, which restores random generators and autocast, and has no
requirements on the inputs. This module adds how inputs are stored (`Store`), which operators are not recomputed, and
the named random states.

Without reentrant autograd, DDP sees each parameter once, and results are bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dsjob.compute.activation.rng import TRACKER, go_back_to
from dsjob.compute.activation.stores import Store
from dsjob.compute.activation.timing import run_timed
from dsjob.torch_private import tree_flatten, tree_unflatten

# Matrix products, convolutions and attention: they take most of a block's time, but little of its memory.
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
    """Whether `mode: selective` keeps the results of an operator (torch._ops.OpOverload)."""
    return operator.namespace == "aten" and operator.overloadpacket.__name__ in _COSTLY


def choose_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `mode: selective`, as a callback for torch.utils.checkpoint."""
    return CheckpointPolicy.MUST_SAVE if is_costly(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed:
    """Replaces a module's `forward` by one that recomputes activations. Wrapping the module would change names.

    It is a class rather than a closure, so that a deep copy of the module gets one that refers to the copy.
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
    """Calls `function`, and calls it again in the backward pass. Until then, `store` keeps the arguments.

    selective: also keep the results of costly operators. If gradients are disabled, this is a plain call.
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
    # Flatten the arguments: torch passes only positional tensors to the hooks, not tensors in dicts.
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))

    def call(*leaves: Any) -> Any:
        again, named = tree_unflatten(leaves, tree)
        return function(*again, **named)

    # Only what `checkpoint` itself saves, the leaves, passes through these hooks: inside, it sets its own.
    with saved_tensors_hooks(store.pack, store.unpack):
        return checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)


def _make_contexts(selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the first run and of the recomputation."""
    first, second = nullcontext(), nullcontext()
    if selective:
        first, second = create_selective_checkpoint_contexts(choose_policy)  # type: ignore[no-untyped-call]
    # torch restores the global generators by itself, but does not know the named ones.
    return (first, _nest(second, go_back_to(TRACKER.get_states()))) if TRACKER.states_ else (first, second)


@contextmanager
def _nest(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
