"""The part of a model on one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dsjob.parallel.pipeline.layers import Layer, LayerSequence, Recompute


@dataclass(frozen=True)
class Stage:
    """The layers of one rank, which may be several chunks of the model.

    module: has the rank's parameters under their names in the whole model. Its `forward` takes `pipe_chunk` and
    `pipe_received`, and returns what to send, or on the last stage the model's output. owners: the names of all
    parameters of the model, in its order, each with the ranks of the pipeline that have it. takes_batch: whether each
    stage is called with the batch, not only the first.
    """

    module: nn.Module
    owners: Mapping[str, tuple[int, ...]]
    chunks: int = 1
    takes_batch: bool = False
    kinds: Sequence[str] = ()  # of all layers, for messages
    bounds: Sequence[int] = ()  # the first layer of each of the stages x chunks parts, and the number of layers


def cut_sequence(
    module: nn.Module,
    layers: Sequence[Layer],
    bounds: Sequence[int],
    *,
    rank: int,
    ranks: int,
    build: Callable[[int, Layer], Any] | None = None,
    interval: int = 0,
    again: Recompute | None = None,
    seed: int | None = None,
    set_seed: Callable[[int], Any] | None = None,
) -> Stage:
    """Leaves of a sequence, in `module`, only the layers of one rank. Builds layers that are not built yet.

    bounds: the first layer of each part; part p belongs to rank p % ranks. build: (number, layer) -> the layer. Others:
    see LayerSequence.
    """
    parts = [range(start, end) for start, end in pairwise(bounds)]
    own = parts[rank::ranks]
    holders = {layer.name: set[int]() for layer in layers}
    for number, part in enumerate(parts):
        for index in part:
            holders[layers[index].name].add(number % ranks)
    made: dict[str, Any] = {}
    for number in sorted(index for part in own for index in part):
        layer = layers[number]
        if layer.name not in made:
            made[layer.name] = layer.made[0] if layer.made else (build or _build)(number, layer)
    names: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        there = tuple(sorted(holders[layer.name]))
        names.update({f"{layer.name}.{name}": there for name in list_names(layer, made.get(layer.name))})
    for name, _ in list(module.named_children()):
        delattr(module, name)
    for name, layer in made.items():
        if isinstance(layer, nn.Module):
            module.add_module(name, layer)
    chunks = [[(index, _bind(layers[index], made)) for index in part] for part in own]
    more = {"set_seed": set_seed} if set_seed is not None else {}
    module.forward = LayerSequence(chunks, interval=interval, again=again, seed=seed, **more)
    kinds = [layer.kind for layer in layers]
    return Stage(module, names, len(own), kinds=kinds, bounds=bounds)


def _build(number: int, layer: Layer) -> Any:
    return layer.make()


def _bind(layer: Layer, made: Mapping[str, Any]) -> Callable[[Any], Any]:
    built = made[layer.name]
    return built if layer.call is None else partial(layer.call, built)


def list_names(layer: Layer, made: Any = None) -> list[str]:
    """The names of a layer's parameters. Builds it without memory, unless it is built."""
    made = made if made is not None else layer.made[0] if layer.made else None
    if made is None:
        with torch.device("meta"), torch.random.fork_rng():
            made = layer.make()
    return [name for name, _ in made.named_parameters()] if isinstance(made, nn.Module) else []
