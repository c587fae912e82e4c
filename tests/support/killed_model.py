"""What jobs that are killed train: little, with everything that a resume has to bring back."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dsjob.callbacks.callback import Callback, RunView

KILL = "TEST_KILL"  # `<rank>:<call>`, or `*:<call>`: the forward pass before which a rank, or each, kills itself


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.out = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        rank, _, call = os.environ.get(KILL, ":0").partition(":")
        if int(call) == self.calls and rank in ("*", os.environ.get("RANK", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return ((self.out(self.drop(torch.relu(self.fc(x)))) - y) ** 2).mean()


class Residual(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.fc, self.out, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.out(torch.tanh(self.fc(x))))


class Deep(nn.Module):
    """Can be divided among pipeline stages and tensor-parallel ranks."""

    tp_plan: ClassVar[dict[str, Any]] = {"blocks.*.fc": "colwise", "blocks.*.out": "rowwise"}

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Residual(drop) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((self.head(x) - y) ** 2).mean()


class Data(torch.utils.data.Dataset[Any]):
    """Samples with random transforms."""

    def __init__(self, n: int = 50, noise: float = 0.1) -> None:
        self.x, self.noise = torch.randn(n, 8, generator=torch.Generator().manual_seed(0)), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] + self.noise * torch.randn(8)
        return x, x.sum(0, keepdim=True)


class RunningMean(Callback):
    """The mean of the loss so far, and what this rank has seen of it."""

    def __init__(self) -> None:
        self.seen, self.mean, self.own = 0, 0.0, torch.zeros(2)

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self.seen += 1
        self.mean += (record["loss"] - self.mean) / self.seen
        self.own = self.own * 0.9 + run.engine.global_rank

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean, "own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean, self.own = state["seen"], state["mean"], state["own"]


def describe(world: int, stage: int, steps: int, **checkpoint: Any) -> dict[str, Any]:
    """The document of such a job, two micro steps to a step on up to 4 ranks."""
    return {
        "model": {"_target_": f"{__name__}.Net"},
        "data": {"train": {"_target_": f"{__name__}.Data"}},
        "trainer": {"train_batch": 8, "grad_accum": 2, "max_steps": steps, "log_every": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
        "callbacks": {"mean": {"_target_": f"{__name__}.RunningMean"}},
        "launch": {"nproc": world},
        "checkpoint": checkpoint,
        "output": {"dir": "run"},
    }
