"""Measures what the ranks of a mesh hold and send, without these ranks: stages, divided layers and divided sequences.

The code that divides a model in a run divides copies of it on the meta device, one for each stage. Process groups are
imagined: their collectives move nothing. Then a micro batch of fake tensors passes through all stages, forward and
backward.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsjob.compute.precision import Precision, cast_floats
from dsjob.contract.spec import JobSpec
from dsjob.engine.blocks import prepare_blocks
from dsjob.errors import UsageError
from dsjob.parallel.pipeline.calls import list_units
from dsjob.parallel.pipeline.layers import Received
from dsjob.parallel.tensor.divide import divide_model
from dsjob.parallel.tensor.plans import find_unused, read_plan
from dsjob.pipelines.timeline import Stream, find_most_held
from dsjob.planning.communication import Axis, Collective, Transfer, make_transfer
from dsjob.planning.model import MASTER_SIZE
from dsjob.planning.report import Activations, Share
from dsjob.ranks.mesh import World
from dsjob.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    find_group_name,
    imagining_ranks,
    own_parameters,
    tree_leaves,
    tree_map_only,
)
from dsjob.training.activations import Saved, find_leaves
from dsjob.training.build import divide_ranks
from dsjob.training.objective import Objective, build_objective
from dsjob.training.pipelines import capture, cut_stage, is_sequence, make_schedule
from dsjob.training.probe import size_model
from dsjob.trust.grant import Trust

_CPU = torch.device("cpu")


class _Part(NamedTuple):
    """The module of a rank. summed: elements that it adds up after a step, by axis: gradients of parameters that
    compute with a part of the activations, and of those that other stages have too."""

    module: nn.Module
    chunks: int
    takes_batch: bool
    summed: Mapping[tuple[Axis, str, int], int]


def measure_shares(built: nn.Module, batch: Any, spec: JobSpec, shards: int, trust: Trust) -> list[Share]:
    """The shares of the stages. built: the model on the meta device, where it stays. batch: of one rank; None if there
    is none, which leaves out activations, and what is sent of them. shards: ranks that ZeRO shards gradients over.

    Raises UsageError, ContractError for a model that cannot be divided; UsageError in a process that has joined others.
    """
    if dist.is_initialized():
        raise UsageError("a process that is in a process group cannot plan divided models", hint="plan before it joins")
    stages = spec.pipeline.size
    total = stages * spec.context_parallel.size * spec.tensor_parallel.ranks
    with imagining_ranks(total):
        world = divide_ranks(spec, World(data_rank=0, local_rank=0, data_size=total, device=_CPU), trust)
        worlds = [replace(world, pipe=replace(world.pipe, rank=stage)) for stage in range(stages)]
        axes: tuple[Axis, ...] = ("context", "tensor")
        along = {axis: world.along(axis) for axis in axes}
        groups = {str(r.group.group_name): (axis, r.size) for axis, r in along.items() if r.group is not None}
        kept = replace(
            spec,
            compile=replace(spec.compile, enabled=False),
            activation_checkpointing=replace(spec.activation_checkpointing, mode="none"),
        )
        parts = [_divide(built, batch, kept, each, trust) for each in worlds]
        models = [size_model(part.module) for part in parts]
        seen = _run(built, parts, batch, spec, trust, groups)
        if spec.activation_checkpointing.mode != "none" and total > stages and not seen.reason:
            # Recomputed blocks communicate again.
            again = replace(kept, activation_checkpointing=spec.activation_checkpointing)
            parts_again = [_divide(built, batch, again, each, trust) for each in worlds]
            passed = _run(built, parts_again, batch, spec, trust, groups)
            seen = seen._replace(traffic=passed.traffic, reason=passed.reason)
    sizes: dict[Axis, int] = {"pipe": stages, **{axis: ranks.size for axis, ranks in along.items()}}
    make, micro_batches = make_schedule(spec.pipeline, trust), spec.trainer.grad_accum
    shares = []
    for stage, (part, model) in enumerate(zip(parts, models, strict=True)):
        stream: Stream | None = None
        if stages > 1:
            stream = [each for step in make(micro_batches, stages, stage) for each in step]
        activations, held = _combine(seen.activations[stage::stages], stream, seen.reason)
        transfers = _list_transfers(seen, part, stage, sizes, micro_batches, shards)
        shares.append(Share(model, activations, held, tuple(transfers)))
    return shares


def _divide(built: nn.Module, batch: Any, spec: JobSpec, world: World, trust: Trust) -> _Part:
    model = copy.deepcopy(built)
    chunks, takes_batch, owners = 1, False, dict[str, tuple[int, ...]]()
    if world.pipe.size > 1:
        if not is_sequence(model):
            _fill_outside_units(model)
        method = spec.pipeline.partition if spec.pipeline.partition.lower() != "time" else "parameters"
        spec = replace(spec, pipeline=replace(spec.pipeline, partition=method, activation_checkpoint_interval=0))
        stage = cut_stage(model, spec, world, trust, lambda: batch)
        model, chunks, takes_batch, owners = stage.module, stage.chunks, stage.takes_batch, dict(stage.owners)
    section = spec.tensor_parallel
    if isinstance(section.plan, Mapping):
        # What another stage has looks unused here. In a run, the stages tell each other.
        unused = find_unused(model, read_plan(section.plan)) if world.pipe.size > 1 else []
        used: Any = {key: value for key, value in section.plan.items() if key not in unused}
        section = replace(section, plan=used)
    divided = divide_model(model, section, world)
    if world.pipe.size == 1:
        prepare_blocks(model, spec)
    summed = Counter[tuple[Axis, str, int]]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for names, ranks in divided.partial:
            axis: Axis = "tensor" if ranks is world.tensor else "context"
            summed[axis, "partial gradients", ranks.size] += parameter.numel() * (name in names)
        sharing = len(owners.get(name, ()))
        if sharing > 1:
            summed["pipe", "tied gradients", sharing] += parameter.numel()
    return _Part(model, chunks, takes_batch, summed)


def _fill_outside_units(model: nn.Module) -> None:
    """Gives parameters and buffers outside the units of a pipeline values, zeros: tracing computes with them."""
    inside = {id(tensor) for unit in list_units(model).values() for tensor in unit.parameters()}
    _replace_tensors(model, lambda t: t if id(t) in inside else torch.zeros_like(t, device=_CPU))


def _replace_tensors(model: nn.Module, change: Any) -> None:
    """Replaces parameters and buffers by `change(tensor)`; tied ones stay tied."""
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by id of the old parameter, which stays alive
    for module in list(model.modules()):
        for name, old in list(own_parameters(module).items()):
            if old is None:
                continue
            if id(old) not in made:
                new = change(old)
                made[id(old)] = old, new if new is old else nn.Parameter(new, old.requires_grad)
            own_parameters(module)[name] = made[id(old)][1]
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, change(buffer))


_Traffic = Counter[tuple[Axis, Collective]]  # bytes


class _Seen(NamedTuple):
    """What a micro batch leaves behind. By part, that is, chunk after chunk of the stages: activations, and bytes of
    the outputs, of the gradients of the inputs, and of the whole tensors of collectives.

    reason: why a part could not compute."""

    activations: list[Activations]
    outputs: list[int]
    gradients: list[int]
    traffic: list[_Traffic]
    reason: str = ""


def _run(built: nn.Module, parts: Sequence[_Part], batch: Any, spec: JobSpec, trust: Trust, groups: _Groups) -> _Seen:
    """Runs a micro batch forward and backward through all chunks of all stages."""
    total = sum(part.chunks for part in parts)
    seen = _Seen([Activations() for _ in range(total)], [0] * total, [0] * total, [Counter() for _ in range(total)])
    if batch is None:
        return seen
    try:
        objective = build_objective(spec, built, _CPU, trust)
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            warnings.simplefilter("ignore")
            _pass(parts, tree_map_only(Tensor, mode.from_tensor, batch), spec, objective, seen, groups)
    except Exception as error:
        told = str(error).strip().splitlines()
        return seen._replace(reason=f"{type(error).__name__}: {told[0] if told else ''}")
    return seen


def _pass(
    parts: Sequence[_Part], batch: Any, spec: JobSpec, objective: Objective, seen: _Seen, groups: _Groups
) -> None:
    dtype = Precision.of(spec, _CPU).compute
    section, on = spec.activation_checkpointing, spec.activation_checkpointing.mode != "none"
    if not on:
        section = replace(section, mode="full", interval=1, cpu_checkpointing=False)
    for part in parts:
        _replace_tensors(part.module, lambda t: _make_fake(t, dtype))
    args, kwargs = capture(objective, batch)
    if dtype != torch.float32:
        args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
    received: Any = None
    borders: list[tuple[Any, Any]] = []  # of each part: what it received, and its outputs
    last = len(seen.outputs) - 1
    for number in range(last + 1):
        part = parts[number % len(parts)]
        own: dict[str, Any] = {}
        if len(parts) > 1:
            own = {"pipe_chunk": number // len(parts), **({"pipe_received": Received(received)} if number else {})}
        given = (args, kwargs) if number == 0 or part.takes_batch else ((), {})
        tensors = [*part.module.parameters(), *part.module.buffers(), *tree_leaves(batch), *tree_leaves(kwargs)]
        saved = Saved(part.module, [*tensors, *tree_leaves(args)], section)
        with saved.watch(), _Counted(seen.traffic[number], groups):
            outputs = part.module(*given[0], **given[1], **own)
            found = objective.find(outputs, batch) if number == last else []
        if number < last or len(parts) == 1:  # in a pipeline, outputs of the model do not outlive the loss
            saved.add(leaf for leaf in find_leaves(outputs) if isinstance(leaf, Tensor))
        largest = max(saved.sizes.values(), default=0)
        seen.activations[number] = saved.count_checkpointed(Activations(saved.count(), largest=largest, on=on))
        if number == last:
            outputs = objective.add([each.mean for each in found])
        borders.append((received, outputs))
        if number < last:
            seen.outputs[number] = sum(t.nbytes for t in _list_tensors(outputs))
        received = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), outputs)
    gradients: list[Tensor | None] = [None]
    for number in range(last, -1, -1):
        received, outputs = borders[number]
        wanted = [tensor for tensor in _list_tensors(outputs) if tensor.requires_grad]
        with _Counted(seen.traffic[number], groups):
            torch.autograd.backward(wanted, gradients)
        gradients = [t.grad for t in _list_tensors(received) if t.requires_grad]
        seen.gradients[number] = sum(gradient.nbytes for gradient in gradients if gradient is not None)


def _list_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _make_fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    kind = dtype if tensor.is_floating_point() and isinstance(tensor, nn.Parameter) else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind)


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of whole tensors that collectives of some groups are called with."""

    def __init__(self, counts: _Traffic, groups: _Groups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._groups = counts, groups

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func.overloadpacket.__name__) if "c10d" in func.namespace else None
        group = self._groups.get(find_group_name((args, kwargs)) or "") if kind is not None else None
        if kind is not None and group is not None:
            axis, ranks = group
            sizes = [tensor.nbytes for tensor in _list_tensors((args, kwargs))]
            # What a rank contributes, or receives, is the smallest tensor.
            self._counts[axis, kind] += min(sizes) * ranks if kind == "all-gather" else max(sizes)
        return func(*args, **(kwargs or {}))


_Groups = Mapping[str, tuple[Axis, int]]  # by name: the axis, and the number of ranks along it
_KINDS: Mapping[str, Collective] = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
}


def _combine(chunks: Sequence[Activations], stream: Stream | None, reason: str) -> tuple[Activations, int]:
    """The activations of a rank, of all micro batches that it holds at once, and how many these are at most."""
    first = chunks[0]
    if reason or first.whole is None:
        return Activations(reason=reason), 1
    if stream is None:
        return first, 1

    def hold(name: str) -> int:
        return find_most_held(stream, [getattr(chunk, name) or 0 for chunk in kept])

    known = any(chunk.checkpointed is not None for chunk in chunks)
    # A stage without blocks has nothing to recompute.
    kept = [chunk if chunk.checkpointed is not None else replace(chunk, checkpointed=chunk.whole) for chunk in chunks]
    found = Activations(
        whole=hold("whole"),
        checkpointed=hold("checkpointed") if known else None,
        recomputed=max(chunk.recomputed or 0 for chunk in chunks) if known else None,
        largest=max(chunk.largest for chunk in chunks),
        moved=hold("moved"),
        on=first.on,
    )
    return found, find_most_held(stream, [1] * len(chunks))


def _list_transfers(
    seen: _Seen, part: _Part, stage: int, sizes: Mapping[Axis, int], micro_batches: int, shards: int
) -> Iterator[Transfer]:
    """What the ranks of a stage exchange in an optimizer step, but with others on different data."""
    stages = sizes["pipe"]
    sent = [sum(seen.outputs[each::stages]) + sum(seen.gradients[each::stages]) for each in range(stages)]
    if sum(sent):
        most = max(sent) * micro_batches
        yield Transfer("send", "activations and gradients", sum(sent) * micro_batches, most, "pipe")
    counted: _Traffic = sum(seen.traffic[stage::stages], Counter())
    for (axis, kind), size in sorted(counted.items()):
        yield make_transfer(axis, kind, "activations", size * micro_batches, sizes[axis])
    for (axis, what, ranks), elements in part.summed.items():
        if elements:
            yield make_transfer(axis, "all-reduce", what, elements * MASTER_SIZE // shards, ranks)
