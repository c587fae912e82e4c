"""The part of a model on one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from dsjob.errors import UsageError
from dsjob.parallel.pipeline.layers import Layer, LayerSequence, Recompute, look_at


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
    see LayerSequence. Raises UsageError for a parameter that layers on different stages share.
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
    _require_own_parameters(layers, holders)
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


def _require_own_parameters(layers: Sequence[Layer], holders: Mapping[str, set[int]]) -> None:
    """Raises UsageError for built layers that share a parameter on different stages, where it would become two."""
    users: dict[int, tuple[int, str]] = {}  # by id of a parameter: the first layer with it, and its name there
    for number, layer in enumerate(layers):
        built = layer.made[0] if layer.made else None
        for name, parameter in built.named_parameters() if isinstance(built, nn.Module) else ():
            first, known = users.setdefault(id(parameter), (number, name))
            if holders[layers[first].name] != holders[layer.name]:
                raise UsageError(
                    f"layers {first} and {number} of the pipeline share a parameter ({known} is {name}), but are on"
                    " different stages",
                    hint=f'list layer {first} a second time, in dsjob.Layers as {{"tied": {first}}}, or use'
                    " TiedLayerSpec in a PipelineModule",
                )


def _build(number: int, layer: Layer) -> Any:
    return layer.make()


def _bind(layer: Layer, made: Mapping[str, Any]) -> Callable[[Any], Any]:
    built = made[layer.name]
    return built if layer.call is None else partial(layer.call, built)


def list_names(layer: Layer, made: Any = None) -> list[str]:
    """The names of a layer's parameters. Builds it without memory, unless it is built."""
    made = made if made is not None else look_at(layer)
    return [name for name, _ in made.named_parameters()] if isinstance(made, nn.Module) else []
