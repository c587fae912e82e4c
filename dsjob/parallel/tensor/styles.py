"""Divides single layers: which part of their weights a rank keeps, and what happens to their inputs and outputs.

style            weights                     input             output
colwise          by outputs                  whole             divided along its last dimension
colwise_gather   by outputs                  whole             whole: gathered
rowwise          by inputs                   divided           whole: the ranks' outputs are added up
rowwise_split    by inputs                   whole             the same
vocabulary       rows of an embedding        whole indices     whole: added up
replicate        whole                       as it is          as it is
partial          whole; computes with parts of activations, so that its gradients are added up
loss_parallel    by outputs                  whole             divided, for the cross entropy (`tensor.losses`)

A `colwise` embedding is divided by its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.errors import UsageError
from dsjob.parallel.pipeline.walk import replace_forward
from dsjob.parallel.tensor import regions
from dsjob.parallel.tensor.sequences import Sequences
from dsjob.parallel.tensor.streams import Streams
from dsjob.ranks.mesh import Ranks
from dsjob.ranks.splits import Sections, Split, cut, find_split, mark_split


class Place(NamedTuple):
    """Where a layer is: its name in the model, the ranks, and their random numbers if the model draws any.

    sequences: if ranks compute the rest of a block on parts of sequences. gathered: then, whether the module around the
    layer gathers its input.
    """

    name: str
    ranks: Ranks
    streams: Streams | None
    sequences: Sequences | None = None
    gathered: bool = False

    @property
    def owner(self) -> str:
        """The module around the layer."""
        return self.name.rpartition(".")[0]

    def refuse(self, message: str, hint: str) -> UsageError:
        """An error about the layer."""
        return UsageError(f"tensor_parallel: {self.name} {message}", hint=hint)


class Features(NamedTuple):
    """A linear layer's sizes, and the dimensions of its weight for inputs and outputs."""

    inputs: int
    outputs: int
    input_dim: int
    output_dim: int


def read_features(module: nn.Module) -> Features | None:
    """The sizes of a linear layer: torch.nn.Linear, or transformers' Conv1D, whose weight is transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    split = find_split(weight)  # by a layer that shares it
    first, second = weight.shape if split is None else split.shape(weight.shape)
    if isinstance(module, nn.Linear):
        return Features(second, first, 1, 0)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return Features(first, second, 0, 1)
    return None


def split_parameter(parameter: Tensor, dim: int, place: Place, sections: Sections = 1) -> None:
    """Keeps this rank's part of a parameter, in place. Tied layers must divide it in the same way."""
    known = find_split(parameter)
    if known is not None:
        if (known.dim, known.sections) != (dim, sections):
            raise place.refuse("shares its weight with a layer that divides it in another way", "leave one of them out")
        return
    split = Split(dim, parameter.shape[dim], place.ranks, sections)
    parameter.data = split.take(parameter.data)
    mark_split(parameter, split)
    # As Megatron marks it: each rank counts its own part in the norm of gradients.
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _require_divisible(size: int, what: str, place: Place, sections: Sections = 1) -> None:
    ranks, hint = place.ranks.size, "leave it out of tensor_parallel.plan, or use another tensor_parallel.size"
    if isinstance(sections, int):
        if size % (ranks * sections):
            among = f"among {ranks} ranks" if sections == 1 else f"into {ranks} x {sections} sections"
            raise place.refuse(f"has {size} {what}, which do not divide {among}", hint)
        return
    if sum(sections) != size:
        hint = "its sections must add up to them"
        raise place.refuse(f"has {size} {what}, but its sections have {sum(sections)}", hint)
    if uneven := next((length for length in sections if length % ranks), None):
        raise place.refuse(f"has a section of {uneven} {what}, which do not divide among {ranks} ranks", hint)


def colwise(
    module: nn.Module, place: Place, *, gathers: bool = False, divisible: bool = True, sections: Sections = 1
) -> None:
    """See the table above. divisible: whether the ranks must have equally many outputs."""
    if isinstance(module, nn.Embedding):
        _divide_columns(module, place, gathers=gathers)
        return
    features, weight = _require_linear(module, place)
    if divisible and not gathers:
        _require_divisible(features.outputs, "outputs", place, sections)
    _watch_inputs(module, place)
    split_parameter(weight, features.output_dim, place, sections)
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        split_parameter(bias, 0, place, sections)
    if hasattr(module, "nf"):  # Conv1D's number of outputs
        module.nf = weight.shape[1]  # type: ignore[assignment]
    if gathers:
        _then(module, lambda y: regions.gather(y, -1, features.outputs, place.ranks))
    elif place.streams is not None:
        _entering_streams(module, place, place.streams)


def _divide_columns(module: nn.Embedding, place: Place, *, gathers: bool) -> None:
    columns = module.embedding_dim
    _require_divisible(columns, "columns", place)
    split_parameter(module.weight, 1, place)
    if gathers:
        _then(module, lambda y: regions.gather(y, -1, columns, place.ranks))
    elif place.streams is not None:
        _entering_streams(module, place, place.streams)


def _entering_streams(module: nn.Module, place: Place, streams: Streams) -> None:
    owner = place.owner

    def enter(module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            streams.enter(owner)

    module.register_forward_hook(enter)


def rowwise(module: nn.Module, place: Place, *, splits: bool = False) -> None:
    """See the table above."""
    if isinstance(module, nn.Embedding):
        divide_rows(module, place)
        return
    features, weight = _require_linear(module, place)
    _require_divisible(features.inputs, "inputs", place)
    split_parameter(weight, features.input_dim, place)
    ranks, own = place.ranks, features.inputs // place.ranks.size
    sequences, streams, name = place.sequences, place.streams, place.name
    multiply: Callable[[Tensor, Tensor], Tensor] = F.linear if features.input_dim == 1 else torch.matmul

    def forward(module: Any, x: Tensor) -> Tensor:
        if splits:
            x = regions.take_part(x, -1, ranks)
        if x.shape[-1] != own:
            raise UsageError(
                f"tensor_parallel: {name} received inputs of width {x.shape[-1]}, but its part has {own} of"
                f" {own * ranks.size}",
                hint="divide the layer before it (colwise), or give this one the style rowwise_split",
            )
        if streams is not None:
            streams.leave()
        y = multiply(x, module.weight)
        y = regions.add_up(y, ranks) if sequences is None else sequences.add_up(y)
        bias = module.bias
        return y if bias is None else y + bias.to(y.dtype)

    replace_forward(module, forward)


def divide_rows(module: nn.Embedding, place: Place) -> None:
    """Divides an embedding by its rows: the ranks look up different indices."""
    if module.max_norm is not None or module.sparse:
        raise place.refuse("has max_norm or sparse gradients", "leave it out of tensor_parallel.plan")
    ranks, rows, padding = place.ranks, module.num_embeddings, module.padding_idx
    split_parameter(module.weight, 0, place)
    start, stop = cut(rows, ranks.size, ranks.rank)
    own_padding = padding - start if padding is not None and start <= padding < stop else None

    def forward(module: Any, indices: Tensor) -> Tensor:
        others = (indices < start) | (indices >= stop)
        own = F.embedding((indices - start).masked_fill(others, 0), module.weight, own_padding)
        return regions.add_up(own.masked_fill(others[..., None], 0.0), ranks)

    replace_forward(module, forward)


def _require_linear(module: nn.Module, place: Place) -> tuple[Features, Tensor]:
    """The sizes and the weight of a linear layer."""
    features, weight = read_features(module), getattr(module, "weight", None)
    if hasattr(module, "base_layer"):
        raise place.refuse(
            "has an adapter, which no plan of a model knows",
            "write tensor_parallel.plan with its parts: NAME.base_layer and NAME.lora_B.default are colwise, or"
            " NAME.base_layer and NAME.lora_A.default rowwise",
        )
    if features is None or not isinstance(weight, Tensor):
        raise place.refuse(
            f"is a {type(module).__name__}, which is no linear layer and no embedding",
            "name layers of torch.nn.Linear, torch.nn.Embedding or transformers' Conv1D",
        )
    return features, weight


def _watch_inputs(module: nn.Module, place: Place) -> None:
    """Adds up the gradients of a layer's input over the ranks; with parts of sequences, also gathers the input."""
    ranks, sequences = place.ranks, place.sequences
    if place.gathered:
        return

    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return (regions.enter(x, ranks) if sequences is None else sequences.gather(x), *rest)

    module.register_forward_pre_hook(take)


def _then(module: nn.Module, change: Callable[[Tensor], Any]) -> None:
    module.register_forward_hook(lambda module, args, output: change(output))
