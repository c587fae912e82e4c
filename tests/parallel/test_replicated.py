"""Replicated at its end, when torch frees DDP and the process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engines import make_engine
from ranks import run_ranks
from torch import nn

from dsjob.ranks.mesh import World


def free_engine_last(world: World) -> bool:
    """Destroys the process group and then frees the engine, while gloo's threads still finish broadcasts."""
    engine = make_engine(0, net=nn.Linear(64, 64))
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    for _ in range(50):
        dist.broadcast(torch.ones(100_000), 0, async_op=True)
    dist.destroy_process_group()
    del engine
    return True


@pytest.mark.timeout(60)
def test_an_engine_freed_after_its_process_group_does_not_hang() -> None:
    assert run_ranks(free_engine_last, 2) == [True, True]
