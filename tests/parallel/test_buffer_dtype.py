"""`data_types.buffer_dtype`: the dtype of a model's buffers, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.ranks.mesh import World


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((4,), 1.001))
        self.register_buffer("count", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x)) * self.scale.to(x.dtype)
        return y


def list_dtypes(world: World, stage: int, asked: str | None) -> dict[str, torch.dtype]:
    types = {"data_types": {"buffer_dtype": asked}} if asked else {}
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **types}
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = dsjob.initialize(model=Buffered(), config={**config, **optimizer})[0]
    engine.backward(engine(torch.ones(2, 4)).float().square().mean())
    engine.step()
    return {name: buffer.dtype for name, buffer in engine.module.named_buffers()}


class Listing(nn.Module):
    """As models of transformers list what must be fp32."""

    _keep_in_fp32_modules_strict = ("bias",)
    _keep_in_fp32_modules = ("inner.scale",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Buffered()
        self.register_buffer("bias_correction", torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("other", torch.ones(4))


@pytest.mark.parametrize(
    ("given", "low", "fp32"),
    [
        ({"buffer_dtype": "bf16"}, "bf16", {"bias_correction"}),
        ({"buffer_dtype": "bf16"}, "fp16", {"bias_correction", "inner.scale"}),
        ({"buffer_dtype": "bf16", "keep_in_fp32_modules": ["inner*le", "oth"]}, "bf16", {"inner.scale", "other"}),
        ({"buffer_dtype": "bf16", "keep_in_fp32_modules": []}, "bf16", set()),
        ({}, "bf16", {"bias_correction", "inner.scale", "other"}),
    ],
)
def test_some_buffers_stay_in_fp32(given: dict[str, Any], low: str, fp32: set[str]) -> None:
    config = {"train_batch_size": 1, low: {"enabled": True}, "data_types": given}
    engine = dsjob.initialize(model=Listing(), config=config)[0]
    named = {name: buffer.dtype for name, buffer in engine.module.named_buffers() if "norm" not in name}
    assert {name for name, dtype in named.items() if dtype == torch.float32} == fp32


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_dtype_unless_another_is_asked_for(stage: int) -> None:
    kept = {"norm.running_mean": torch.float32, "norm.running_var": torch.float32}
    kept |= {"norm.num_batches_tracked": torch.int64, "count": torch.int64}
    for asked, dtype in ((None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for rank in run_ranks(list_dtypes, 2, stage, asked):
            assert rank == {**kept, "scale": dtype}, asked
