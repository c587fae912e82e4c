"""Keeps an exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.callbacks.callback import Callback, RunView
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError
from dsjob.optim.shards import local


class EMA(Callback):
    """After each step, moves an fp32 average of every trained weight: `average = decay * average + (1 - decay) *
    weight`. Averages start at the first weights.

    decay: from 0 to below 1. evaluate: whether evaluations during training use the averages instead of the weights.
    Buffers, such as the statistics of batch norm, are not averaged.

    Averages are sharded like the weights, and saved in checkpoints, so any number of ranks resumes them bit for bit.
    `dsjob convert --ema` writes them, and `dsjob eval --ema`, `predict --ema` and `generate --ema` use them. Tasks
    after training use the weights; with checkpoint.load_best_at_end and checkpoint.ema, the averages. Raises
    ContractError for another decay, and with `engine: deepspeed`.
    """

    def __init__(self, decay: float = 0.999, evaluate: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ContractError(f"decay is {decay}", hint="write a number of at least 0 and below 1, such as 0.999")
        self._decay, self._evaluate = decay, evaluate
        self._updates = 0

    def on_setup(self, run: RunView) -> None:
        for engine in run.engines.values():
            if engine.driver:
                raise ContractError("EMA needs dsjob's own engine", hint="set engine: dsjob")
            # Before a checkpoint is loaded, which writes into these tensors.
            masters = engine.strategy.masters
            engine.strategy.averages = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def on_start(self, run: RunView) -> None:
        if self._updates == 0:  # not resumed: the weights may be those of another run
            for engine in run.engines.values():
                for average, weight in _list_pairs(engine):
                    average.copy_(weight)

    @torch.no_grad()
    def on_step(self, run: RunView) -> None:
        self._updates += 1
        for engine in run.engines.values():
            if pairs := _list_pairs(engine):
                averages, weights = (list(tensors) for tensors in zip(*pairs, strict=True))
                torch._foreach_lerp_(averages, weights, 1 - self._decay)

    def on_eval_start(self, run: RunView) -> None:
        self._swap(run)

    def on_eval(self, run: RunView, metrics: Any) -> None:
        self._swap(run)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]

    @torch.no_grad()
    def _swap(self, run: RunView) -> None:
        """Swaps averages and weights, with memory for one tensor."""
        for engine in run.engines.values() if self._evaluate else ():
            for average, weight in _list_pairs(engine):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
            engine.strategy.weights_changed()


def _list_pairs(engine: Engine) -> list[tuple[Tensor, Tensor]]:
    """The parts of averages and weights that this rank holds."""
    masters = engine.strategy.masters
    return [(local(average), local(masters[name].detach())) for name, average in engine.strategy.averages.items()]
