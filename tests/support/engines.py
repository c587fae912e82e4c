"""Engines over the small network of the fixtures, and a hand-written loop to compare them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from net import Net
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsjob
import dsjob.deepspeed as deepspeed
from dsjob.deepspeed import DeepSpeedEngine
from dsjob.engine.engine import Engine

FIXTURES = Path(__file__).parent.parent / "data" / "deepspeed_losses"
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}}


def build_net() -> Net:
    """The fixtures' network with the weights that their runs began with."""
    net = Net()
    net.load_state_dict(load_file(FIXTURES / "init.safetensors"))
    return net


def read_fixture(name: str) -> Any:
    """`losses.json` or `batches.json`."""
    return json.loads((FIXTURES / name).read_text())


def make_engine(stage: int, *, net: nn.Module | None = None, **config: Any) -> Engine:
    """An engine at a ZeRO stage; `config` as in `make_config`."""
    return dsjob.initialize(model=net or build_net(), config=make_config(stage, **config))[0]


def make_deepspeed_engine(stage: int, *, net: nn.Module | None = None, **config: Any) -> DeepSpeedEngine:
    """The same with DeepSpeed's names."""
    return deepspeed.initialize(model=net or build_net(), config=make_config(stage, **config))[0]


def make_config(
    stage: int, *, accumulation: int = 1, bf16: bool | dict[str, Any] = False, **config: Any
) -> dict[str, Any]:
    """A DeepSpeed config with micro batches of 2."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage},
        "bf16": bf16 if isinstance(bf16, dict) else {"enabled": bf16},
        **config,
    }


def make_tokens(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one global batch: int64 [rows, 11], the same for every caller."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 53, (rows, 12), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_engine(engine: Engine, first: int, steps: int, rows: int = 12) -> list[float]:
    """Trains on this rank's rows of each global batch; this rank's mean loss of each step."""
    world, accumulation = engine.world, engine.rhythm.accumulation
    part = rows // world.data_size // accumulation
    losses = []
    for step in range(first, first + steps):
        x, y = make_tokens(step, rows)
        total = 0.0
        for micro in range(accumulation):
            start = (micro * world.data_size + world.data_rank) * part
            loss = engine(x[start : start + part], y[start : start + part])
            total += float(loss.detach()) / accumulation
            engine.backward(loss)
            engine.step()
        losses.append(total)
    return losses


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Every tensor that a checkpoint keeps, gathered, by its checkpoint name."""
    state = engine.state()
    tensors = {**state.model_tensors(), **state.optimizer_tensors()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def train_by_hand(steps: int, rows: int = 12, net: nn.Module | None = None, clip: float = 1.0) -> dict[str, Tensor]:
    """Plain PyTorch on the whole batch, one process: the weights after `steps` steps."""
    model = net or build_net()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(steps):
        x, y = make_tokens(step, rows)
        model(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
