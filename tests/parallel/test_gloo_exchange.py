"""Messages between pairs of ranks move and add what gloo's collectives do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dsjob.parallel.gloo import exchange_directly
from dsjob.ranks.mesh import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 5000)


def find_exchanges(world: World) -> tuple[Any, Any]:
    """The two functions as a unit of FSDP2 has them."""
    unit = fully_shard(nn.Linear(2, 2), mesh=world.data_mesh)
    exchange_directly(unit, 0)
    state: Any = unit._get_fsdp_state()
    group = state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
    return group._all_gather_comm, group._reduce_scatter_comm


def compare(world: World) -> list[tuple[str, Tensor, Tensor]]:
    """What was done, by messages, and by gloo."""
    gather, reduce = find_exchanges(world)
    ranks, group = world.data_size, world.data_mesh.get_group()
    rows = []
    for dtype in DTYPES:
        for size in SIZES:
            torch.manual_seed(100 * world.data_rank + size)
            own = torch.randn(size).to(dtype)
            ours = gather.allocate((ranks * size,), dtype=dtype, device=own.device)
            gather(ours, own, group)
            theirs = torch.empty_like(ours)
            dist.all_gather_into_tensor(theirs, own)
            rows.append((f"gather {size} {dtype}", ours, theirs))
            whole = torch.randn(ranks * size).to(dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                part = torch.empty(size, dtype=dtype)
                reduce(part, whole.clone(), group, op)
                exact = whole.double()
                dist.all_reduce(exact)
                exact = exact.view(ranks, -1)[world.data_rank] / (ranks if op == dist.ReduceOp.AVG else 1)
                rows.append((f"reduce {size} {dtype} {op}", part, exact.to(dtype)))
    return rows


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_they_give_what_collectives_give(world_size: int) -> None:
    for rows in run_ranks(compare, world_size):
        assert len(rows) == 3 * len(DTYPES) * len(SIZES)
        for name, ours, exact in rows:
            if name.startswith("gather"):
                assert torch.equal(ours, exact), name
            else:
                torch.testing.assert_close(ours, exact, rtol=0, atol=8 * torch.finfo(ours.dtype).eps, msg=name)
