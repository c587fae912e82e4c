"""Logs the norms of parts of the gradient, and names parameters whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dsjob.callbacks.callback import Callback, RunView, name_model
from dsjob.compute.find_blocks import find_blocks
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError
from dsjob.optim.shards import add_parts, local

_MOST_NAMED = 3


class GradientNorms(Callback):
    """Measures the L2 norm of the gradients of each part of a model every `every` steps, before clipping, and adds the
    latest norms to log records, as `grad_norm/PART`; with `models`, as `grad_norm/MODEL/PART`.

    by: what a part is: a parameter `group`, a `block` of the model (`rest` is what lies outside of blocks), or a
    `parameter`. Norms are over all ranks, at every ZeRO stage. If a norm is not finite, the callback names the
    parameters; in fp16, where the loss scale handles overflows, it does not.

    The host waits for the device in each measured step. Raises ContractError for invalid arguments, with `engine:
    deepspeed`, and with trainer.mpu.
    """

    def __init__(self, by: Literal["group", "block", "parameter"] = "block", every: int = 10) -> None:
        if by not in ("group", "block", "parameter"):
            raise ContractError(f"by is {by!r}", hint="write group, block or parameter")
        if every < 1:
            raise ContractError(f"every is {every}", hint="write a number of steps from 1 on")
        self._by, self._every = by, every
        self._norms: dict[str, float] = {}

    def on_start(self, run: RunView) -> None:
        for model, engine in run.engines.items():
            if engine.driver:
                raise ContractError("GradientNorms needs dsjob's own engine", hint="set engine: dsjob")
            if engine.world.opaque or engine.world.pipe.size > 1:
                raise ContractError(
                    "GradientNorms does not support pipelines, and models that trainer.mpu splits", hint="remove it"
                )
            if engine.optimizer is not None:
                parts = self._name_parts(engine)
                engine.strategy.parts.gradient_watches.append(
                    partial(self._measure, run, name_model(run, model), engine, parts)
                )

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        return {f"grad_norm/{part}": norm for part, norm in self._norms.items()}

    def _name_parts(self, engine: Engine) -> dict[str, str]:
        """The part that each trained parameter belongs to."""
        masters = engine.strategy.masters
        if self._by == "parameter":
            return {name: name for name in masters}
        if self._by == "group":
            assert engine.optimizer is not None
            groups = engine.optimizer.param_groups
            of = {id(p): str(group.get("name", "rest")) for group in groups for p in group["params"]}
            return {name: of.get(id(master), "rest") for name, master in masters.items()}
        blocks = {id(block) for block in find_blocks(engine.module)}
        prefixes = [name for name, module in engine.module.named_modules() if id(module) in blocks]
        return {
            name: next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), "rest") for name in masters
        }

    @torch.no_grad()
    def _measure(self, run: RunView, model: str, engine: Engine, parts: Mapping[str, str], by: float | Tensor) -> None:
        """Measures reduced gradients, which are still to be divided `by` a number. A collective under sharding."""
        step = engine.global_steps + 1
        masters = engine.strategy.masters
        gradients = {name: each.grad for name, each in masters.items() if each.grad is not None}
        if step % self._every or not gradients:
            return
        # float64 [parameters, 1]: in fp32, the square of a norm above 1.8e19 would be infinite.
        own = [local(gradient).norm(dtype=torch.float64).square() for gradient in gradients.values()]
        squares = torch.stack([square.to(engine.device) for square in own])[:, None]
        # The masters, which know how tensor parallelism divides them; their gradients are sharded like them.
        add_parts(squares, [masters[name] for name in gradients])
        names = dict.fromkeys(parts[name] for name in gradients)
        rows = {part: row for row, part in enumerate(names)}
        index = torch.tensor([rows[parts[name]] for name in gradients], device=engine.device)
        norms = squares.new_zeros(len(rows)).index_add_(0, index, squares[:, 0]).sqrt()
        factor = by.to(norms) if isinstance(by, Tensor) else by
        self._norms |= {f"{model}{part}": norm for part, norm in zip(names, (norms / factor).tolist(), strict=True)}
        finite = squares[:, 0].isfinite().tolist()
        bad = [name for name, good in zip(gradients, finite, strict=True) if not good]
        if bad and not engine.precision.needs_scale:
            more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
            shown = ", ".join(f"{model}{name}" for name in bad[:_MOST_NAMED])
            run.say("gradients", f"not finite in step {step}: {shown}{more}")
