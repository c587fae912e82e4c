"""Callbacks and metrics that remember something, for jobs of `small_jobs`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from small_jobs import Net
from torch import Tensor, nn
from torchmetrics import MeanMetric

from dsjob.callbacks.callback import Callback, RunView

SEEN: list[bytes] = []  # the inputs of each micro batch, on this process


class Recording(Net):
    """Takes down what it is given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        SEEN.append(x.numpy().tobytes())
        return super().forward(x, y)


class Patience(Callback):
    """Halves the rate whenever the loss was below its running mean twice in a row: the weights depend on its state."""

    def __init__(self) -> None:
        self.mean, self.seen, self.waited, self.best, self.lowered = torch.zeros(2), 0, 0, (math.inf, -1), list[int]()

    def on_start(self, run: RunView) -> None:
        torch.rand(1)  # what a callback draws is no part of training

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self.seen += 1
        self.mean[0] += (record["loss"] - self.mean[0]) / self.seen
        self.best = min(self.best, (record["loss"], run.step))
        self.waited = self.waited + 1 if record["loss"] < self.mean[0] else 0
        if self.waited >= 2:
            self.waited = 0
            self.lowered.append(run.step)
            for group in run.engine.optimizer.param_groups:  # type: ignore[union-attr]
                group["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.__dict__.keys() == state.keys()
        self.mean.copy_(state.pop("mean"))  # it is on the CPU, whatever the device of one's own
        self.__dict__.update(state)


class Tuning(Callback):
    """Sets rates and betas between the schedule's steps; from the sixth step on rates are tensors, as compiled
    optimizers have them."""

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        for group in run.engine.optimizer.param_groups:  # type: ignore[union-attr]
            if run.step == 6:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)
            if run.step % 3 == 0:
                group["lr"] *= 0.7
                group["betas"] = (0.7, 0.93)


class OwnNumber(Callback):
    """Keeps what only its rank knows: a list of a number of its own for each step."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self.numbers.append(10 * run.step + run.engine.global_rank)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


class Nested(OwnNumber):
    """Keeps a tensor where a checkpoint has no place for one."""

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [torch.zeros(1)]}


class Holds(OwnNumber):
    """Gives what it was made with, or has been given since, as its state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        pass

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Grows(OwnNumber):
    """Has more to keep with each step, at the fourth more than a checkpoint takes."""

    def state_dict(self) -> dict[str, Any]:
        return {"text": "x" * 300_000 * len(self.numbers)}


class FailsOnRank1(OwnNumber):
    """Has state on rank 0 alone."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if os.environ.get("RANK", "0") == "0" else {"odd": object()}


def make_unlike() -> Callback:
    """A callback that has state on rank 0, and methods for it there alone."""
    return OwnNumber() if os.environ.get("RANK", "0") == "0" else Callback()


class Fails(OwnNumber):
    """Cannot take its own state back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("mine")


class MeanOfAll(MeanMetric):
    """The mean of the loss over all evaluations so far, in torchmetrics' own state."""

    def __init__(self) -> None:
        super().__init__()
        self.persistent(True)

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        self.update(outputs)
        found: Tensor = self.compute()
        return found


class Judge(nn.Module):
    """A metric that is a model of its own, whose weights are none of a checkpoint's business."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(width, 1024)

    def forward(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs


class Masked(Net):
    """Masks its input with numbers of a named state, as models of several ranks do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from dsjob.checkpointing import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        if "masks" not in tracker.get_states():
            tracker.add("masks", 7)
        with tracker.fork("masks"):
            mask = torch.rand(x.shape, device=x.device) > 0.3
        return super().forward(x * mask, y)


class WithSwitches(Callback):
    """Has attributes that are called like hooks, and are none."""

    on_weekdays = True

    def __init__(self) -> None:
        self.on_gpu = True


class Misspelt(Callback):
    """Other programs call it so."""

    def on_stepped(self) -> None:
        """Nobody calls it here."""
