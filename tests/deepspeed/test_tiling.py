"""`deepspeed.zero.TiledLinear`: tiles compute what the whole layer does, and stage 3 gathers each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


@pytest.mark.parametrize(("into", "out"), [(1, 1), (2, 3), (5, 1), (7, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_compute_what_the_layer_does(into: int, out: int, bias: bool) -> None:
    whole = nn.Linear(7, 9, bias=bias)
    tiled = TiledLinear(7, 9, bias=bias, in_splits=into, out_splits=out, init_linear=whole)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    x = torch.randn(2, 3, 7, requires_grad=True)
    torch.testing.assert_close(tiled(x), whole(x))
    (own,) = torch.autograd.grad(tiled(x).square().sum(), x)
    torch.testing.assert_close(own, torch.autograd.grad(whole(x).square().sum(), x)[0])


class Apart(nn.Linear):
    """Gives its bias back, as Megatron's layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return nn.functional.linear(x, self.weight), self.bias


def test_inputs_and_outputs_may_stay_in_parts() -> None:
    whole, x = nn.Linear(6, 4), torch.randn(3, 6)
    given: dict[str, Any] = {"in_splits": 3, "out_splits": 2, "init_linear": whole}
    parts = TiledLinear(6, 4, input_is_already_split=True, combine_out_splits=False, **given)(x.chunk(3, -1))
    torch.testing.assert_close(torch.cat(parts, -1), whole(x))
    output, bias = TiledLinearReturnBias(6, 4, linear_cls=Apart, **given)(x)
    torch.testing.assert_close(output + bias, whole(x))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="in_splits is 7"):
        deepspeed.zero.TiledLinear(6, 4, in_splits=7)
    with pytest.raises(UsageError, match="out_splits is 0"):
        TiledLinear(6, 4, out_splits=0)
    with pytest.raises(UsageError, match="another shape or bias"):
        TiledLinear(6, 4, init_linear=nn.Linear(6, 4, bias=False))
    with pytest.raises(UsageError, match="got 2 inputs"):
        TiledLinear(6, 4, in_splits=3, input_is_already_split=True)([torch.ones(3), torch.ones(3)])


class Block(nn.Module):
    def __init__(self, tiles: int) -> None:
        super().__init__()
        torch.manual_seed(1)  # tiles draw other numbers than the layer
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        if tiles > 1:
            self.up = TiledLinear(8, 12, in_splits=2, out_splits=tiles, init_linear=self.up)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def train(world: World, tiles: int, stage: int, bf16: bool) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    head = nn.Linear(8, 1)
    model = nn.Sequential(*(Block(tiles) for _ in range(2)), head)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    rank, size = world.everyone.rank, world.everyone.size
    losses = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    layers = [module for module in model.modules() if type(module).__name__.endswith("Linear")]
    tiled = [isinstance(layer, FSDPModule) for layer in layers if "Tiled" not in type(layer).__name__]
    return losses, sum(tiled) == 2 * 2 * tiles


@pytest.mark.parametrize(("stage", "bf16"), [(3, False), (3, True), (1, False)])
def test_stage_3_gathers_each_tile_by_itself(stage: int, bf16: bool) -> None:
    whole = run_ranks(train, 2, 1, 0, bf16)
    for (losses, apart), (expected, _) in zip(run_ranks(train, 2, 3, stage, bf16), whole, strict=True):
        assert losses == pytest.approx(expected, rel=2e-2 if bf16 else 1e-5)
        assert apart == (stage == 3)
