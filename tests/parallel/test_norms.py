"""Norms and clipping of shards on plain tensors: bit for bit those of torch on DTensors."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dsjob.optim.shards import local
from dsjob.parallel.norms import total_norm
from dsjob.parallel.strategy import multiply
from dsjob.ranks.mesh import World

SHAPES = [(5, 7), (64,), (1,), (3, 2, 9)]  # the third leaves a rank without elements


@torch.no_grad()
def clip_on_rank(world: World) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(8):
        shards = [distribute_tensor(torch.randn(s, generator=draw), world.data_mesh, [Shard(0)]) for s in SHAPES]
        own, parameters = [shard.clone() for shard in shards], [nn.Parameter(shard) for shard in shards]
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter.grad = shard
        norm = get_total_norm(shards).full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(norm, total_norm(own, world.device))
        clip_grads_with_norm_(parameters, 1.0, norm)
        multiply(own, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        assert all(torch.equal(local(a), local(b)) for a, b in zip(shards, own, strict=True))


def test_norms_and_clipping_of_shards_equal_those_of_dtensors() -> None:
    run_ranks(clip_on_rank, 2)
