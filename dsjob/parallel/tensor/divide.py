"""Divides the layers of a model among the ranks along `tensor`, and its sequences among those along `context`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from dsjob.compute.find_blocks import find_blocks
from dsjob.contract.divided import TensorParallel
from dsjob.errors import ConfigWarning, UsageError
from dsjob.parallel.strategy import align
from dsjob.parallel.tensor import partition_config
from dsjob.parallel.tensor.contexts import divide_contexts, register_end
from dsjob.parallel.tensor.guesses import guess
from dsjob.parallel.tensor.losses import keep_logits_divided
from dsjob.parallel.tensor.plans import (
    Choice,
    divide_vocabulary,
    find_plan,
    find_unused,
    match,
    refuse_without_plan,
)
from dsjob.parallel.tensor.sequences import Sequences, divide_sequences
from dsjob.parallel.tensor.streams import Streams, draws
from dsjob.parallel.tensor.styles import Place, colwise, divide_rows, read_features, rowwise
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import Ranks, World
from dsjob.ranks.splits import Split, find_split
from dsjob.terminal import warn

_WHOLE = ("replicate", "partial")


class Divided(NamedTuple):
    """The parameters of a model whose layers are divided, by name.

    splits: those of which each rank along `tensor` has a part. partial: those whose gradients some ranks add up,
    because each has computed with a part of the activations; with these ranks.
    """

    splits: Mapping[str, Split] = {}
    partial: tuple[tuple[frozenset[str], Ranks], ...] = ()


def divide_model(model: nn.Module, section: TensorParallel, world: World) -> Divided:
    """Divides the layers of `model` among the ranks along `tensor`, as its plan says, and sequences among those along
    `context`. A collective, unless both axes have one rank.

    Raises UsageError for a model without a plan, and for layers that do not divide evenly.
    """
    if world.opaque or world.tensor.size == world.context.size == 1:
        return Divided()
    if world.context.size == 1:
        return _divide_layers(model, section, world)
    draw = draws(model)
    contexts, blocks = divide_contexts(
        model, world.context, Streams(world.context.rank, world.device) if draw else None
    )
    divided = _divide_layers(model, section, world) if world.tensor.size > 1 else Divided()
    register_end(contexts, blocks)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    names = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)
    align(model, dataclasses.replace(world, data_group=world.context.group))
    return divided._replace(partial=(*divided.partial, (names, world.context)))


def _divide_layers(model: nn.Module, section: TensorParallel, world: World) -> Divided:
    ranks = world.tensor
    chosen = _choose(model, section, world)
    _require_heads(model, ranks.size)
    # Otherwise, ranks could keep parts of different weights: a program may have seeded them differently.
    own = {id(parameter) for parameter in model.parameters() if find_split(parameter) is not None}
    align(model, dataclasses.replace(world, data_group=ranks.group), but=own)
    if section.loss_parallel:
        chosen |= divide_vocabulary(model, chosen)
    partial = _divide_all(model, chosen, section, world)
    named = dict(model.named_parameters())
    splits = {name: split for name, parameter in named.items() if (split := find_split(parameter)) is not None}
    if not splits and world.pipe.size == 1 and section.partition_config is None:
        raise UsageError(
            f"tensor_parallel.plan divides no layer of {type(model).__name__}",
            hint="give some layers the styles colwise and rowwise",
        )
    names = frozenset(name for name, p in named.items() if id(p) in partial and name not in splits)
    return Divided(splits, ((names, ranks),) if names else ())


def _choose(model: nn.Module, section: TensorParallel, world: World) -> dict[str, Choice]:
    """The choice for each module, by its name. Raises UsageError."""
    listed = partition_config.choose(model, section)
    if listed is not None:
        if any(all_gather(world.pipe, bool(listed))):
            return listed
        raise UsageError(
            f"tensor_parallel: no pattern of partition_config or preset_model matches a layer of"
            f" {type(model).__name__}",
            hint="patterns match the names of parameters from their beginning: .*\\.o_proj\\.weight$, for example",
        )
    plan = find_plan(model, section.plan if isinstance(section.plan, Mapping) else None)
    if plan is not None:
        _require_used(model, plan, section, world)
        return match(model, plan)
    guessed = guess(model)
    if any(all_gather(world.pipe, bool(guessed))):
        if world.everyone.rank == 0:
            warn(_describe_guess(model, guessed), ConfigWarning, stacklevel=2)
        return guessed
    raise refuse_without_plan(model, world.tensor.size)


def _describe_guess(model: nn.Module, guessed: Mapping[str, Choice]) -> str:
    named: dict[str, list[str]] = {"colwise": [], "rowwise": []}
    for name, choice in guessed.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern not in named.get(choice.style, (pattern,)):
            named[choice.style].append(pattern)
    listed = "; ".join(f"{style}: {', '.join(patterns)}" for style, patterns in named.items())
    return (
        f"tensor_parallel: {type(model).__name__} has no plan, so its layers are divided by their names, sizes and"
        f" order ({listed}); tensor_parallel.plan can say otherwise"
    )


def _divide_all(model: nn.Module, chosen: Mapping[str, Choice], section: TensorParallel, world: World) -> set[int]:
    """Divides the chosen modules. Returns the ids of parameters that compute with parts of activations."""
    ranks, modules = world.tensor, dict(model.named_modules())
    streams = Streams(ranks.rank, world.device) if draws(model) else None
    divided = {name: modules[name] for name, choice in chosen.items() if choice.style not in _WHOLE}
    partial = {
        id(p) for name, choice in chosen.items() if choice.style == "partial" for p in modules[name].parameters()
    }
    sequences, gathered, inside = None, set[str](), set[str]()
    if section.sequence_parallel:
        sequences = Sequences(ranks, streams)
        blocks = [block for block in find_blocks(model, sharing=True) if set(divided.values()) & set(block.modules())]
        # A stage of a pipeline may have no block.
        sequences = sequences if blocks or world.pipe.size == 1 else None
        inside = {name for name in divided if any(divided[name] is m for block in blocks for m in block.modules())}
        if sequences is not None:
            gathered = divide_sequences(model, blocks, {name: divided[name] for name in inside}, sequences)
        partial |= {id(parameter) for block in blocks for parameter in block.parameters()}
    for name, choice in chosen.items():
        if name in inside:
            place = Place(name, ranks, None, sequences, name in gathered)
        else:
            place = Place(name, ranks, streams if sequences is None else None)
        _divide(model, modules[name], choice, place, world)
    if streams is not None:
        model.register_forward_hook(lambda module, args, output: streams.leave())
    return partial


def _divide(model: nn.Module, module: nn.Module, choice: Choice, place: Place, world: World) -> None:
    if choice.style in ("colwise", "colwise_gather"):
        colwise(module, place, gathers=choice.style == "colwise_gather", sections=choice.sections)
    elif choice.style == "loss_parallel":
        features = read_features(module)
        colwise(module, place._replace(streams=None), divisible=False)
        assert features is not None  # colwise has refused anything else
        keep_logits_divided(model, module, place.ranks, features.outputs, world.device)
    elif choice.style in ("rowwise", "rowwise_split"):
        rowwise(module, place, splits=choice.style == "rowwise_split")
    elif choice.style == "vocabulary":
        if not isinstance(module, nn.Embedding):
            raise place.refuse("is no embedding", "the style vocabulary is for torch.nn.Embedding")
        divide_rows(module, place)
    for name in choice.divide:
        count: Any = getattr(module, name, None)
        if not isinstance(count, int) or count % place.ranks.size:
            found = f"{name} {count}" if isinstance(count, int) else f"no number {name}"
            raise place.refuse(
                f"has {found}, which does not divide among {place.ranks.size} ranks",
                "use a tensor_parallel.size that divides the number of heads",
            )
        setattr(module, name, count // place.ranks.size)


def _require_used(model: nn.Module, plan: Mapping[str, Choice], section: TensorParallel, world: World) -> None:
    """Raises UsageError for a pattern of the user's that matches nothing, on any stage of a pipeline."""
    unused = set.intersection(*map(set, all_gather(world.pipe, find_unused(model, plan))))
    if unused and isinstance(section.plan, Mapping):
        names = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
        raise UsageError(
            f"tensor_parallel.plan: {min(unused)} matches no module of {type(model).__name__}",
            hint=f"its modules are called {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}",
        )


def _require_heads(model: nn.Module, size: int) -> None:
    """Raises UsageError if heads of a model of transformers would be cut in two."""
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise UsageError(
                f"tensor_parallel.size is {size}, but the model has {name} {count}",
                hint=f"use a size that divides {count}",
            )
