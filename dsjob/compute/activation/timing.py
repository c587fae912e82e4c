"""Measures recomputed functions, for `profile` and `synchronize_checkpoint_boundary` of the section."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from dsjob.contract.spec import ActivationCheckpointing
from dsjob.torch_private import tree_flatten, tree_leaves, tree_unflatten

LOG = logging.getLogger("dsjob.checkpointing")


def show_times() -> None:
    """Makes the log messages with times visible in a program that has not configured logging."""
    LOG.setLevel(logging.INFO)
    if not LOG.hasHandlers():
        LOG.addHandler(logging.StreamHandler())


def run_timed(
    run: Callable[..., Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    section: ActivationCheckpointing,
) -> Any:
    """Calls `run(function, args, kwargs)`. With `profile`, logs the times of its forward and backward pass.

    The backward pass begins with the first gradient of an output, and ends with the last gradient of an input. If no
    input requires a gradient, its end is unknown, and nothing is logged.
    """
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    # Views of the inputs: their gradients come only from this function, so the last one marks the end.
    leaves = [leaf.view_as(leaf) if _has_gradient(leaf) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, tree)
    clock = _Clock(getattr(function, "__qualname__", type(function).__name__), section)
    clock.start()
    outputs = run(function, args, kwargs)
    clock.stop("forward")
    begins = [leaf for leaf in tree_leaves(outputs) if _has_gradient(leaf)]
    ends = [leaf for leaf in leaves if _has_gradient(leaf)]
    if begins and ends:
        # any: the first gradient to arrive starts the clock. The default mode below waits for all of them.
        register_multi_grad_hook(begins, lambda _: clock.start(), mode="any")
        register_multi_grad_hook(ends, lambda _: clock.stop("backward"))
    return outputs


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Clock:
    def __init__(self, name: str, section: ActivationCheckpointing) -> None:
        self._name, self._section, self._started = name, section, 0.0

    def start(self) -> None:
        self._synchronize()
        self._started = time.perf_counter()

    def stop(self, what: str) -> None:
        self._synchronize()
        if self._section.profile:
            LOG.info("%s: %s took %.3f ms", self._name, what, 1000 * (time.perf_counter() - self._started))

    def _synchronize(self) -> None:
        # GPU kernels run in the background: without waiting, the clock would measure only their launch.
        if self._section.synchronize_checkpoint_boundary and torch.cuda.is_available():
            torch.cuda.synchronize()
