"""A plan for a model that has none, from the names, sizes and order of the layers in its blocks (DeepSpeed's AutoTP).

A block is a module in a ModuleList. Its inputs are divided (rowwise) in the last linear layer before a norm, and in
layers with names such as `o_proj`. The layers before such a layer are divided by outputs (colwise). DeepSpeed divides
all of them. Here, their sizes must fit: a layer with fewer outputs than the rowwise one has inputs stays whole. One
with more is an error: it seems to compute several things at once, and their order is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from dsjob.errors import UsageError
from dsjob.parallel.tensor.heads import add_counts
from dsjob.parallel.tensor.plans import Choice
from dsjob.parallel.tensor.styles import Features, read_features

_ROWS = ("out_proj", "o_proj", "down_proj")
# Layers that compute keys and values may have fewer outputs than that of queries.
_KEYS = re.compile(r"^(k|v|key|value)(_|$)")


class _Layer(NamedTuple):
    name: str
    features: Features | None  # None: a norm

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def guess(model: nn.Module) -> dict[str, Choice]:
    """The choice for each module, by its name; empty if there is nothing to divide. Raises UsageError."""
    found: dict[str, Choice] = {}
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
            for number, block in module.named_children():
                found |= _guess_block(f"{name}.{number}", block)
    return add_counts(model, found)


def _guess_block(prefix: str, block: nn.Module) -> dict[str, Choice]:
    layers = list(_list_layers(prefix, block))
    found: dict[str, Choice] = {}
    before: list[_Layer] = []
    for number, layer in enumerate(layers):
        following = layers[(number + 1) % len(layers)]
        if layer.features is None:
            continue
        if layer.last not in _ROWS and (following.features is not None or len(layers) == 1):
            before.append(layer)
            continue
        columns = {one.name: Choice("colwise", sections) for one, sections in _fit(before, layer.features.inputs)}
        if columns:
            found |= {**columns, layer.name: Choice("rowwise")}
        before = []
    return found


def _list_layers(prefix: str, block: nn.Module) -> Iterator[_Layer]:
    """The linear layers and the norms of a block, in its order."""
    for name, module in block.named_modules():
        features = read_features(module)
        if features is not None or "norm" in type(module).__name__.lower():
            yield _Layer(f"{prefix}.{name}", features)


def _fit(layers: list[_Layer], inputs: int) -> Iterator[tuple[_Layer, int]]:
    """Those of `layers` whose outputs are the `inputs` of the next, with their sections."""
    whole = any(layer.features is not None and layer.features.outputs % inputs == 0 for layer in layers)
    for layer in layers:
        outputs = layer.features.outputs if layer.features is not None else 0
        if outputs == inputs or (whole and inputs % outputs == 0 and _KEYS.match(layer.last)):
            yield layer, 1
        elif outputs == 2 * inputs and "gate_up_proj" in layer.last:
            yield layer, 2
        elif outputs > inputs:
            raise UsageError(
                f"tensor_parallel: {layer.name} has {outputs} outputs for a layer with {inputs} inputs, so it seems to"
                " compute several things at once, in an order that dsjob does not know",
                hint="write tensor_parallel.plan, with sections for this layer: {style: colwise, sections: 3},"
                " for example",
            )
