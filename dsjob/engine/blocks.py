"""Recomputes and compiles the repeated blocks of a model, as the document says.

Both replace a block's `forward`, so parameter names do not change, and hooks (such as those with which FSDP2 gathers
parameters for both passes) stay outside. `compute.find_blocks` finds the blocks, and `compute.activation` recomputes
them.

Normally, the compiler works inside the recomputed function. With `mode: selective`, it works outside, because it must
see the policy. That policy works by operator; modules inside a block that are gathered separately (autocast at stages 1
to 3) would confuse it, so a rule rejects this combination. Both turn off transformers' `use_cache`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dsjob import checkpointing
from dsjob.compute.activation.recompute import Recomputed
from dsjob.compute.find_blocks import find_blocks
from dsjob.contract.spec import EngineSpec
from dsjob.errors import ContractError
from dsjob.terminal import warn
from dsjob.torch_private import COMPILER_LOG, LIMIT_REACHED, raise_recompile_limit
from dsjob.torch_private.compile_cache import use_private_cache

_FOR_ONE = 8  # torch's default recompile_limit


def prepare_blocks(model: nn.Module, spec: EngineSpec) -> None:
    """Changes the blocks of `model` in place. Call it before sharding the model.

    Raises ContractError if there are no blocks to recompute, or if torch does not know the compiler backend.
    """
    section = spec.activation_checkpointing
    blocks = find_blocks(model, sharing=True)
    for block in (*blocks, model):  # undo the changes of an earlier engine
        while isinstance(block.forward, (Recomputed, Compiled)):
            block.forward = block.forward.forward
    if not checkpointing.is_configured():
        checkpointing.adopt(section)
    # Every interval-th block, starting with the first.
    again = blocks[:: section.interval] if section.mode != "none" else []
    if section.mode != "none" and not blocks:
        raise ContractError(
            f"activation_checkpointing.mode is {section.mode}, but {type(model).__name__} has no repeated blocks",
            hint="blocks are siblings of the same class in an nn.ModuleList or nn.Sequential; in a model without them, "
            "call dsjob.checkpointing.checkpoint yourself",
        )
    selective = section.mode == "selective"
    store = checkpointing.make_store(section)
    for block in again:
        block.forward = Recomputed(block.forward, store=store, selective=selective)
    chosen = spec.compile
    if chosen.enabled:
        mode = chosen.mode if chosen.mode != "default" else None
        compile_blocks(model, chosen.backend, mode=mode, fullgraph=chosen.fullgraph, dynamic=chosen.dynamic)
    if again or chosen.enabled:
        _drop_caches(model)


def compile_blocks(model: nn.Module, backend: str, **options: Any) -> None:
    """Compiles the repeated blocks of `model` in place, or the whole model if it has none; also after sharding.

    options: arguments of torch.compile. Raises ContractError if torch does not know the backend, StorageError if there
    is no folder for compiled code to which no other user can write.
    """
    if backend not in torch.compiler.list_backends(()):  # also those for debugging
        known = ", ".join(torch.compiler.list_backends())
        raise ContractError(f"compile.backend: torch has no backend {backend}", hint=f"available: {known}")
    use_private_cache()
    blocks = find_blocks(model, sharing=True) or [model]
    for block in blocks:
        # The compiler must see a policy by operator, but the other recomputation would only break its graphs.
        outer = block.forward
        owner: Any = outer if isinstance(outer, Recomputed) and not outer.selective else block
        owner.forward = Compiled(owner.forward, backend=backend, **options)
    _expect_compilations(len(blocks))


class Compiled:
    """A `forward` compiled with torch.compile. A copy of the module gets its own, which is compiled again."""

    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        self.forward, self.options = forward, options
        self._compiled = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    # For deepcopy and pickle: the copy compiles its own `forward`.
    def __reduce__(self) -> Any:
        return functools.partial(Compiled, **self.options), (self.forward,)


def _expect_compilations(blocks: int) -> None:
    """Raises torch's limit on recompilations in proportion to the number of blocks, which share one `forward`.

    Blocks that differ in an integer (`layer_idx`) are compiled separately, and torch would stop after eight.
    """
    raise_recompile_limit(_FOR_ONE * blocks)
    if _explain_limit not in COMPILER_LOG.filters:
        COMPILER_LOG.addFilter(_explain_limit)


def _explain_limit(record: logging.LogRecord) -> bool:
    """Replaces torch's message that it stops compiling a function by a warning in terms of the job document."""
    if LIMIT_REACHED not in str(record.msg) or not isinstance(record.args, tuple):
        return True
    _, limit, function, reason, *_ = record.args
    warn(
        f"compile: torch has compiled {function} {limit} times and now runs other cases without compilation; the last "
        f"reason: {str(reason).strip()}. If sizes change, set compile.dynamic: true",
        stacklevel=2,
    )
    return False


def _drop_caches(model: nn.Module) -> None:
    """Turns off transformers' caches for generation. Recomputation would fill them twice, and the compiler would
    compile each layer separately, because each has its own place in them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
