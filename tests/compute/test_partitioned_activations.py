"""Inputs kept in slices over model-parallel ranks: whole again in the backward pass, a share until then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import Ledger
from ranks import run_ranks
from torch import Tensor, nn

from dsjob import checkpointing
from dsjob.ranks.mesh import World

LAYERS, ROWS, WIDTH = 6, 301, 33  # odd, so that slices are padded


class Mpu:
    """All ranks as one model-parallel group, in Megatron's words."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()


def run(through: Any, dtype: torch.dtype) -> tuple[list[Tensor | None], int]:
    """Gradients of the input and of all weights; and the bytes that the forward pass leaves."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    layers = [layer.to(dtype) for layer in layers]
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    hidden = x
    with Ledger() as ledger:
        ledger.mark("before")
        for layer in layers:
            hidden = through(layer, hidden)
        ledger.mark("after")
    hidden.float().square().mean().backward()
    return [x.grad, *(p.grad for layer in layers for p in layer.parameters())], ledger.live("after") - ledger.live(
        "before"
    )


def partition(world: World, contiguous: bool, in_cpu: bool, dtype: torch.dtype) -> dict[str, Any]:
    plain, _ = run(lambda layer, x: layer(x), dtype)
    whole, kept_whole = run(checkpointing.checkpoint, dtype)
    checkpointing.configure(
        Mpu(),
        partition_activations=True,
        contiguous_checkpointing=contiguous,
        num_checkpoints=LAYERS if contiguous else None,
        checkpoint_in_cpu=in_cpu,
    )
    sliced, kept_sliced = run(checkpointing.checkpoint, dtype)
    return {"plain": plain, "whole": whole, "sliced": sliced, "kept": (kept_whole, kept_sliced)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "contiguous", "in_cpu", "dtype"),
    [
        (2, False, False, torch.float32),
        (2, True, False, torch.float32),
        (2, True, True, torch.bfloat16),
        (3, False, False, torch.float32),
    ],
)
def test_gradients_are_the_same_and_a_rank_keeps_its_share(
    world_size: int, contiguous: bool, in_cpu: bool, dtype: torch.dtype
) -> None:
    inputs = LAYERS * ROWS * WIDTH * dtype.itemsize
    output = inputs // LAYERS
    states = LAYERS * 5056  # of the random generator
    for found in run_ranks(partition, world_size, contiguous, in_cpu, dtype):
        torch.testing.assert_close(found["sliced"], found["plain"], rtol=0, atol=0)
        torch.testing.assert_close(found["whole"], found["plain"], rtol=0, atol=0)
        whole, sliced = found["kept"]
        assert whole - states - output == pytest.approx(inputs - output, rel=0.05)  # the first one is the caller's
        assert sliced - states - output == pytest.approx(inputs / world_size, rel=0.05)


def draw(world: World) -> tuple[Tensor, Tensor]:
    checkpointing.configure(Mpu())
    checkpointing.model_parallel_cuda_manual_seed(99)
    with checkpointing.get_cuda_rng_tracker().fork():
        forked = torch.rand(5)
    return torch.rand(5), forked


@pytest.mark.slow
def test_model_parallel_ranks_share_one_stream_and_have_another_of_their_own() -> None:
    (common, own), (common_too, other) = run_ranks(draw, 2)
    torch.testing.assert_close(common, common_too, rtol=0, atol=0)
    assert not torch.equal(own, other)
    torch.testing.assert_close(own, torch.rand(5, generator=torch.Generator().manual_seed(99 + 2718)), rtol=0, atol=0)
    torch.testing.assert_close(other, torch.rand(5, generator=torch.Generator().manual_seed(99 + 2719)), rtol=0, atol=0)
