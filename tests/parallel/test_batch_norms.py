"""Batch norms in half precision: computed in fp32, with fp32 statistics, at every stage."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.parallel.statistics import keep_statistics_wide
from dsjob.ranks.mesh import World

FP32, BF16, FP16 = {}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=0.01), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_computes_with_its_own_weights(duplicate: Callable[[Net], Net]) -> None:
    net, x = Net().bfloat16(), torch.randn(4, 1, 5, 5).bfloat16()
    keep_statistics_wide(net)
    other = duplicate(net)
    expected = net(x)
    with torch.no_grad():
        net.norm.weight.zero_()
    assert torch.equal(other(x), expected)
    assert not torch.equal(net(x), expected)
    assert int(other.norm.num_batches_tracked) == 1


def train(world: World, stage: int, precision: dict[str, Any], folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    sgd = {"type": "SGD", "params": {"lr": 0.05}}
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": sgd,
        "zero_optimization": {"stage": stage},
    }
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "fp16" in precision else torch.float32
    engine = dsjob.initialize(model=Net(), config={**base, **precision})[0]
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(6):
        x = torch.randn(8, 1, 5, 5, generator=generator)[world.data_rank * 4 :][:4]
        loss = (engine(x.to(dtype)).float() - x.mean((1, 2, 3), keepdim=True)[:, :, 0, 0]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(folder)
    again = dsjob.initialize(model=Net(), config={**base, **precision})[0]
    again.load_checkpoint(folder)
    norm, loaded = (each.module.get_submodule("norm") for each in (engine, again))
    buffers, kept = (dict(each.named_buffers()) for each in (norm, loaded))
    with torch.no_grad():
        evaluated = engine.eval()(torch.ones(4, 1, 5, 5).to(dtype)).float()
    same = all(torch.equal(buffers[name], kept[name]) for name in buffers) or world.data_rank > 0
    return {"losses": losses, "buffers": buffers, "same": same, "evaluated": evaluated}


def train_all(world: World, folder: str) -> list[dict[str, Any]]:
    cells = [(0, FP32), *((stage, BF16) for stage in range(4)), (0, FP16), (2, FP16)]
    return [train(world, stage, precision, f"{folder}/{n}") for n, (stage, precision) in enumerate(cells)]


@pytest.mark.full
def test_half_precision_follows_fp32_with_statistics_in_fp32(tmp_path: Any) -> None:
    for plain, *others in run_ranks(train_all, 2, str(tmp_path)):
        for found in others:
            torch.testing.assert_close(found["losses"], plain["losses"], rtol=0.05, atol=0.005)
            torch.testing.assert_close(found["evaluated"], plain["evaluated"], rtol=0.1, atol=0.05)
            assert found["same"]
            assert found["buffers"]["running_mean"].dtype == found["buffers"]["running_var"].dtype == torch.float32
            assert int(found["buffers"]["num_batches_tracked"]) == 6
            torch.testing.assert_close(
                found["buffers"]["running_var"], plain["buffers"]["running_var"], rtol=0.01, atol=0
            )
