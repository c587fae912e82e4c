"""What a document asks of the repeated blocks of a model: to be computed again in the backward pass, to be compiled.

Both put something in the place of a block's `forward`, so that no name of a parameter changes and hooks (FSDP2's, which
gather parameters for both passes) stay around it. `compute.find_blocks` finds the blocks, and
`compute.activation` computes them again.

The compiler works inside what is computed again, but outside under `mode: selective`, whose policy it has to see. That
policy counts operators; modules that are gathered by themselves inside a block (autocast from stage 1 on) would
confuse it, so a rule rejects the two together. transformers' `use_cache` is switched off for both.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dsjob import checkpointing
from dsjob.compute.activation.recompute import Recomputed
from dsjob.compute.find_blocks import find_blocks
from dsjob.contract.spec import Compile, EngineSpec
from dsjob.errors import ContractError
from dsjob.torch_private import COMPILER_LOG, LIMIT_REACHED, raise_recompile_limit

_FOR_ONE = 8  # torch's own recompile_limit


def prepare_blocks(model: nn.Module, spec: EngineSpec) -> None:
    """Changes the blocks of `model` in place, before it is sharded.

    Raises ContractError where there are none to be computed again, and for a compiler that torch does not know.
    """
    section = spec.activation_checkpointing
    blocks = find_blocks(model, sharing=True)
    for block in (*blocks, model):  # an engine of before may have left its own there
        while isinstance(block.forward, (Recomputed, Compiled)):
            block.forward = block.forward.forward
    if not checkpointing.is_configured():
        checkpointing.adopt(section)
    again = blocks[:: section.interval] if section.mode != "none" else []
    if section.mode != "none" and not blocks:
        raise ContractError(
            f"activation_checkpointing.mode is {section.mode}, but {type(model).__name__} has no repeated blocks",
            hint="blocks are siblings of one class in an nn.ModuleList or nn.Sequential; a model without them can call "
            "dsjob.checkpointing.checkpoint itself",
        )
    selective = section.mode == "selective"
    compiled: Sequence[nn.Module] = (blocks or [model]) if spec.compile.enabled else ()
    # A policy by operator has to be seen by the compiler; anything else it would rather not see.
    for block in compiled if not selective else ():
        block.forward = Compiled(block.forward, spec.compile)
    store = checkpointing.make_store(section)
    for block in again:
        block.forward = Recomputed(block.forward, store=store, selective=selective)
    for block in compiled if selective else ():
        block.forward = Compiled(block.forward, spec.compile)
    if compiled:
        _expect_compilations(len(compiled))
    if again or compiled:
        _drop_caches(model)


class Compiled:
    """A `forward` compiled by torch.compile. A copy of the module has one of its own, compiled anew."""

    def __init__(self, forward: Callable[..., Any], spec: Compile) -> None:
        self.forward, self.spec = forward, spec
        mode = spec.mode if spec.mode != "default" else None
        if spec.backend not in torch.compiler.list_backends(()):  # also those for debugging
            known = ", ".join(torch.compiler.list_backends())
            raise ContractError(f"compile.backend: torch has no {spec.backend}", hint=f"known are {known}")
        self._compiled = torch.compile(
            forward, backend=spec.backend, mode=mode, fullgraph=spec.fullgraph, dynamic=spec.dynamic
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Compiled, (self.forward, self.spec)


def _expect_compilations(blocks: int) -> None:
    """Lets torch compile the one `forward` that `blocks` blocks share as often for each as it would for one.

    Blocks that differ in an integer (`layer_idx`) are compiled one by one, and torch stops after eight.
    """
    raise_recompile_limit(_FOR_ONE * blocks)
    if _tell_of_the_limit not in COMPILER_LOG.filters:
        COMPILER_LOG.addFilter(_tell_of_the_limit)


def _tell_of_the_limit(record: logging.LogRecord) -> bool:
    """Puts torch's message that it compiles a function no more into the words of a job document."""
    if LIMIT_REACHED not in str(record.msg) or not isinstance(record.args, tuple):
        return True
    _, limit, function, reason, *_ = record.args
    warnings.warn(
        f"compile: torch has compiled {function} {limit} times and runs it without compilation where that does not "
        f"fit; the last reason: {str(reason).strip()}. compile.dynamic: true helps where sizes change",
        stacklevel=2,
    )
    return False


def _drop_caches(model: nn.Module) -> None:
    """transformers' models fill caches for generation as they run: a second run would fill them once more, and a
    compiler makes a block of its own of each layer's place in them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
