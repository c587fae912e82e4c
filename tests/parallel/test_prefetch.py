"""How far ahead stage 3 gathers blocks, as real units show it in the midst of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_engine, train_engine
from net import Block, Net
from ranks import run_ranks

from dsjob.contract.sharding import choose_ahead
from dsjob.ranks.mesh import World

BLOCK = sum(p.numel() for p in Block(17).parameters())  # elements of one of five


def watch(world: World, zero: dict[str, Any]) -> tuple[list[float], int, int]:
    """Losses, and the most blocks that were there, or on their way, as one computed: forward and backward."""
    torch.manual_seed(0)
    net = Net(n=5)
    engine = make_engine(3, net=net, zero_optimization={"stage": 3, **zero})
    most = [0, 0]

    def look(direction: int) -> None:
        groups = [block._get_fsdp_state()._fsdp_param_group for block in engine.module.blocks]
        there = [g._all_gather_result is not None or not g.is_sharded for g in groups]
        most[direction] = max(most[direction], sum(there))

    for block in engine.module.blocks:
        block.ln.register_forward_pre_hook(lambda *_: look(0))
        block.ln.register_full_backward_hook(lambda *_: look(1))
    return train_engine(engine, 0, 3), *most  # type: ignore[return-value]


def compare(world: World) -> list[tuple[list[float], int, int]]:
    bucket = "stage3_prefetch_bucket_size"
    ways = [
        {},
        {bucket: 10},
        {bucket: 2 * BLOCK},
        {bucket: 5e7},
        {bucket: 5e7, "stage3_max_live_parameters": 4 * BLOCK},
    ]
    return [watch(world, way) for way in ways]


@pytest.mark.slow
@pytest.mark.full
def test_blocks_are_gathered_as_far_ahead_as_the_document_says() -> None:
    for found in run_ranks(compare, 2):
        losses = found[0][0]
        assert all(seen[0] == losses for seen in found)
        assert [seen[1] for seen in found] == [1, 1, 3, 5, 4]
        assert [seen[2] for seen in found] == [2, 2, 3, 5, 4]


def test_ahead_goes_what_fits_and_one_block_at_least() -> None:
    assert choose_ahead([4, 4, 4, 4], 9) == [2, 2, 1, 0]
    assert choose_ahead([4, 4, 4, 4], 3) == [1, 1, 1, 0]
    assert choose_ahead([4, 4, 4, 4], 100, live=12) == [2, 2, 1, 0]
    assert choose_ahead([4, 1, 1, 9], 3) == [2, 1, 1, 0]
    assert choose_ahead([], 3) == []
