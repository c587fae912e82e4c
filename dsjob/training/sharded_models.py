"""A large model at ZeRO stage 3, built without memory for all of it on any rank.

A constructor draws the initial values of all parameters one after the other, so it runs on every rank. But each rank
keeps only the values of its share of the parameters (`parallel.own_parts`). Then it sends each rank its rows of them,
as under `zero.Init`. Where that is not possible, each rank builds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsjob.checkpoint.live.rng import keep_rng
from dsjob.contract import sharding
from dsjob.contract.paths import Path
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec, Target
from dsjob.errors import DsjobError
from dsjob.parallel.own_parts import Sketch, build_together
from dsjob.parallel.presharded import is_unshardable, shard_parameters
from dsjob.ranks.agreement import find_host_group
from dsjob.ranks.heap import returning_memory
from dsjob.ranks.mesh import World
from dsjob.ranks.seeding import seed_rng
from dsjob.training.build import MakeModel, build_model
from dsjob.training.probe import build_on_meta
from dsjob.trust.grant import Trust

Say = Callable[[str, str], None]  # prints a title and a text
_CPU = torch.device("cpu")


def choose_maker(job: ResolvedJob, world: World, say: Say) -> MakeModel:
    """What builds the models of a job that has no pipeline. say: tells the user if a large model is built whole on each
    rank, and why."""
    spec = job.spec
    if not sharding.builds_in_shares(spec) or world.data_size == 1 or world.model.size > 1:
        return build_model
    return lambda target, trust, where: _build_in_shares(target, trust, where, spec, world, say)


def _build_in_shares(target: Target, trust: Trust, where: Path, spec: JobSpec, world: World, say: Say) -> nn.Module:
    sketch = _draw(target, trust)
    owners = _choose_owners(sketch.model, world.data_size) if sketch is not None else {}
    rank = world.data_mesh.get_local_rank()
    own = {name for name, owner in owners.items() if owner in (None, rank)}
    model, problem = build_together(sketch, lambda: build_model(target, trust, where), own, world)
    if model is None:
        if problem:
            say("note", f"each rank builds the whole model in host memory before it keeps its shards: {problem}")
        seed_rng(spec.trainer.seed)
        return build_model(target, trust, where)
    with returning_memory(keeps=world.device.type == "cpu"):
        _exchange(model, owners, spec, world)
    return model


def _draw(target: Target, trust: Trust) -> Sketch | None:
    """The model on the meta device; None if it is small, or cannot be built there."""
    try:
        with keep_rng(_CPU):
            sketch = Sketch(lambda: build_on_meta(target, trust, downloads=True))
    except DsjobError:
        return None  # building the model itself tells what is wrong with it
    size = sum(parameter.numel() * parameter.itemsize for parameter in sketch.model.parameters())
    return sketch if size >= sharding.LEAST_IN_SHARES else None


def _choose_owners(model: nn.Module, ranks: int) -> dict[str, int | None]:
    """The rank that builds each parameter, by name; None for all ranks."""
    parameters = dict(model.named_parameters())
    sizes = [parameter.numel() * parameter.itemsize for parameter in parameters.values()]
    owners = divide_evenly(sizes, ranks)
    return {
        name: None if is_unshardable(parameter) else owner
        for (name, parameter), owner in zip(parameters.items(), owners, strict=True)
    }


def _exchange(model: nn.Module, owners: Mapping[str, int | None], spec: JobSpec, world: World) -> None:
    """Gives each rank its rows of all parameters, on its device or where they are offloaded to. A collective."""
    off = spec.zero_optimization.offload == "param"
    group = find_host_group(world.data) if off else world.data_mesh.get_group()
    mesh = DeviceMesh.from_group(group, "cpu" if off else world.device.type)
    sources = {id(parameter): owners[name] or 0 for name, parameter in model.named_parameters()}
    shard_parameters(model, mesh, source=lambda parameter: sources[id(parameter)])


def divide_evenly(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item, in order, so that all ranks get about equally many bytes. sizes: bytes of each item.

    Unlike `pipelines.partition.balance`, it takes linear time, and a rank may get nothing.
    """
    total, before, chosen = sum(sizes), 0, []
    for size in sizes:
        chosen.append(min((before + size // 2) * ranks // total, ranks - 1) if total else 0)
        before += size
    return chosen
