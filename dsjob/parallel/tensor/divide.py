"""Divides the layers of a model among the ranks along the `tensor` axis, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from dsjob.contract.divided import TensorParallel
from dsjob.errors import UsageError
from dsjob.parallel.strategy import align
from dsjob.parallel.tensor.plans import Choice, find_plan, find_unused, match
from dsjob.parallel.tensor.streams import Streams, draws
from dsjob.parallel.tensor.styles import Place, colwise, divide_rows, rowwise
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.ranks.splits import Split, find_split


class Divided(NamedTuple):
    """The parameters of a model whose layers are divided, by name.

    splits: those of which each rank has a part. partial: those whose gradients the ranks add up.
    """

    splits: Mapping[str, Split] = {}
    partial: frozenset[str] = frozenset()


def divide_layers(model: nn.Module, section: TensorParallel, world: World) -> Divided:
    """Divides the layers of `model` as its plan says. A collective, unless there is one rank along `tensor`.

    Raises UsageError for a model without a plan, and for layers that do not divide evenly.
    """
    ranks = world.tensor
    if ranks.size == 1 or world.opaque:
        return Divided()
    plan = find_plan(model, section.plan if isinstance(section.plan, Mapping) else None, ranks.size)
    _require_used(model, plan, section, world)
    _require_heads(model, ranks.size)
    # Otherwise, ranks could keep parts of different weights: a program may have seeded them differently.
    align(model, dataclasses.replace(world, data_group=ranks.group))
    streams = Streams(ranks.rank, world.device) if draws(model) else None
    modules = dict(model.named_modules())
    partial: set[int] = set()
    for name, choice in match(model, plan).items():
        module, place = modules[name], Place(name, ranks, streams)
        _divide(module, choice, place)
        if choice.style == "partial":
            partial |= {id(parameter) for parameter in module.parameters()}
    if streams is not None:
        model.register_forward_hook(lambda module, args, output: streams.leave())
    named = dict(model.named_parameters())
    splits = {name: split for name, parameter in named.items() if (split := find_split(parameter)) is not None}
    if not splits:
        raise UsageError(
            f"tensor_parallel.plan divides no layer of {type(model).__name__}",
            hint="give some layers the styles colwise and rowwise",
        )
    return Divided(splits, frozenset(name for name, parameter in named.items() if id(parameter) in partial))


def _divide(module: nn.Module, choice: Choice, place: Place) -> None:
    if choice.style in ("colwise", "colwise_gather"):
        colwise(module, place, gathers=choice.style == "colwise_gather", sections=choice.sections)
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
