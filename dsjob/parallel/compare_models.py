"""Checks that data-parallel ranks have built the same model, before a collective pairs up different parameters."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from dsjob.errors import UsageError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World


def require_same_model(model: nn.Module, world: World) -> None:
    """Compares names, shapes, dtypes and `requires_grad` of parameters, and of buffers, over the data-parallel ranks. A
    collective.

    Raises UsageError with the first difference, on all ranks.
    """
    if world.data_size == 1:
        return
    described = _describe(model)
    digest = hashlib.sha256(repr(described).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(world.device)
    # [64]: the largest of each byte, and 255 minus the smallest. A few bytes, however many ranks there are.
    ends = torch.cat([own, 255 - own])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=world.data_group)
    if torch.equal(ends[:32], 255 - ends[32:]):
        return
    first, *others = all_gather(world.data, described)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    raise UsageError(
        f"the ranks have different models: {_find_difference(first, other, rank)}",
        hint="build the same model on every rank: its layers, and what is frozen, must not depend on the rank, or on "
        "random numbers that are not seeded alike",
    )


def _describe(model: nn.Module) -> list[tuple[str, str]]:
    """The name of each tensor, and what it is, in order."""
    parameters = [
        (name, tensor, "trained" if tensor.requires_grad else "frozen") for name, tensor in model.named_parameters()
    ]
    buffers = [(name, tensor, "a buffer") for name, tensor in model.named_buffers()]
    return [(name, f"{list(tensor.shape)} {tensor.dtype}, {kind}") for name, tensor, kind in [*parameters, *buffers]]


def _find_difference(first: list[tuple[str, str]], other: list[tuple[str, str]], rank: int) -> str:
    """The first difference between the models of rank 0 and of another rank, in words."""
    here, there = dict(first), dict(other)
    for name in [*here, *there]:
        if name not in here or name not in there:
            has, lacks = (0, rank) if name in here else (rank, 0)
            return f"rank {has} has {name} ({(here | there)[name]}), which rank {lacks} lacks"
        if here[name] != there[name]:
            return f"{name} is {here[name]} on rank 0, but {there[name]} on rank {rank}"
    (left, _), (right, _) = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    return f"rank 0 defines {left} where rank {rank} defines {right}"
