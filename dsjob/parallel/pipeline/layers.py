"""Models that are a sequence of layers: what a layer is built from, and the layers of one rank.

Parameters have the names that they have in the sequence as a whole, as in torch.nn.Sequential: `3.weight` belongs to
layer 3. A layer that is tied to an earlier one has its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dsjob.errors import UsageError
from dsjob.ranks.seeding import seed_rng


class LayerSpec:
    """A layer that is built later, only on the ranks that have it: a class or function, and its arguments.

    Raises UsageError if `typename` cannot be called.
    """

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise UsageError(f"LayerSpec got {type(typename).__name__}, not a class", hint="LayerSpec(nn.Linear, 8, 8)")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.name}({', '.join(given)})"

    @property
    def name(self) -> str:
        """The name of the class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self, log: bool = False) -> Any:
        """The layer. `log` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that all TiedLayerSpecs with the same `key` share.

    forward_fn(layer, inputs): is called in place of the layer. tied_weight_attr: the names of the shared parameters,
    for DeepSpeed; here, the whole layer is shared.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


@dataclass(frozen=True)
class Layer:
    """One layer of a sequence. name: of its parameters; shared by tied layers. call: what a forward pass calls.

    kind: the name of its class.
    """

    name: str
    kind: str
    make: Callable[[], Any]
    call: Callable[[Any, Any], Any] | None = None  # (layer, inputs)
    made: list[Any] = field(default_factory=list)  # the built layer, if there is one


def list_layers(given: Iterable[Any]) -> list[Layer]:
    """The layers of a PipelineModule: specs, modules and functions. Raises UsageError for anything else."""
    if isinstance(given, Layers):
        return given.listed()
    found: list[Layer] = []
    tied: dict[str, Layer] = {}
    named = given.named_children() if isinstance(given, nn.Sequential) else ((str(n), x) for n, x in enumerate(given))
    seen: dict[int, str] = {}  # by id of a module that is given
    for name, layer in named:
        if isinstance(layer, TiedLayerSpec):
            first = tied.setdefault(layer.key, Layer(name, layer.name, layer.build))
            found.append(Layer(first.name, layer.name, first.make, layer.forward_fn))
        elif isinstance(layer, LayerSpec):
            found.append(Layer(name, layer.name, layer.build))
        elif callable(layer):
            own = seen.setdefault(id(layer), name) if isinstance(layer, nn.Module) else name
            found.append(Layer(own, type(layer).__name__, partial(_same, layer), made=[layer]))
        elif isinstance(layer, Mapping):
            found.append(_tie(layer, found))
        else:
            raise UsageError(
                f"layer {len(found)} of the pipeline is {type(layer).__name__}, which cannot be called",
                hint="layers are LayerSpec, TiedLayerSpec, torch.nn.Module or functions of one argument",
            )
    return found


def _tie(given: Mapping[str, Any], earlier: Sequence[Layer]) -> Layer:
    number, call = given.get("tied"), given.get("forward")
    if not isinstance(number, int) or not 0 <= number < len(earlier) or given.keys() - {"tied", "forward"}:
        raise UsageError(
            f"layer {len(earlier)} is {dict(given)}",
            hint='write {"tied": N}, N being the number of an earlier layer; "forward" is optional',
        )
    first = earlier[number]
    return Layer(first.name, first.kind, first.make, call or _call_again, made=first.made)


def _call_again(layer: Any, inputs: Any) -> Any:
    return nn.functional.linear(inputs, layer.weight) if isinstance(layer, nn.Embedding) else layer(inputs)


class Layers(nn.Sequential):
    """A model that calls layers one after another, each with the result of the one before.

    layers: modules, functions of one argument, LayerSpec and TiedLayerSpec. {"tied": N} is layer N again, an embedding
    as the output layer with its weight; {"tied": N, "forward": f} is f(layer N, inputs). The first layer gets a tuple
    if the model is called with several arguments. Raises UsageError.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        # Modules are only children of this one, so that a stage can let go of those of other stages.
        self._calls: list[tuple[Layer, Any]] = []  # each with its function, or None for a module
        seen: dict[str, Any] = {}
        for layer in list_layers(layers):
            made = seen[layer.name] if layer.name in seen else seen.setdefault(layer.name, layer.make())
            own = isinstance(made, nn.Module)
            if own:
                self.add_module(layer.name, made)
            self._calls.append((Layer(layer.name, layer.kind, _refuse, layer.call), None if own else made))

    def listed(self) -> list[Layer]:
        """Its layers, all of them built."""
        return [replace(layer, made=[self._find(layer, function)]) for layer, function in self._calls]

    def _find(self, layer: Layer, function: Any) -> Any:
        return getattr(self, layer.name) if function is None else function

    def forward(self, *inputs: Any) -> Any:
        value = inputs[0] if len(inputs) == 1 else inputs
        for layer, function in self._calls:
            made = self._find(layer, function)
            value = made(value) if layer.call is None else layer.call(made, value)
        return value


def _refuse() -> Any:
    raise AssertionError("the layers of Layers are built")


def _same(layer: Any) -> Any:
    return layer


def count_parameters(layers: Sequence[Layer]) -> list[int]:
    """The number of trained elements of each layer; shared ones count for each. Builds layers without memory."""
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.name not in counts:
            counts[layer.name] = _count(layer)
    return [counts[layer.name] for layer in layers]


def _count(layer: Layer) -> int:
    made = look_at(layer)
    if not isinstance(made, nn.Module):
        return 0
    return sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)


def look_at(layer: Layer) -> Any:
    """A layer whose values do not matter: on the meta device, unless it is built already or needs values to be built.
    Draws no random numbers."""
    if layer.made:
        return layer.made[0]
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng([torch.cuda.current_device()] if used else []):
        try:
            with torch.device("meta"):
                return layer.make()
        except Exception:  # for example, it reads a number from a tensor
            return layer.make()


Recompute = Callable[..., Any]  # (function, *inputs) -> its result; as in dsjob.checkpointing.checkpoint


class LayerSequence:
    """The `forward` of a module that holds some layers of a sequence: runs one of its chunks of layers.

    chunks: for each, the layers with their numbers in the sequence. interval: recompute groups of so many layers with
    `again`, if any of them has parameters; 0: none. seed: seeds each layer of each micro batch from this number; None:
    not at all.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[tuple[int, Callable[[Any], Any]]]],
        *,
        interval: int = 0,
        again: Recompute | None = None,
        seed: int | None = None,
        set_seed: Callable[[int], Any] = seed_rng,
    ) -> None:
        self.chunks, self.interval, self.again = chunks, interval, again
        self.seed, self.set_seed = seed, set_seed
        self.passes = [0] * len(chunks)  # forward passes so far, of which each draws other numbers

    def __call__(self, *inputs: Any, pipe_chunk: int = 0, pipe_received: Received | None = None) -> Any:
        """The result of a chunk of layers. Its first layer is called with one argument: what the previous stage has
        sent, or `inputs`, as a tuple if there are several."""
        value = pipe_received.value if pipe_received is not None else inputs[0] if len(inputs) == 1 else inputs
        layers = self.chunks[pipe_chunk]
        self.passes[pipe_chunk] += 1
        round_ = self.passes[pipe_chunk]
        if not self.interval or self.again is None or not torch.is_grad_enabled():
            return self._run(layers, value, round_)
        for start in range(0, len(layers), self.interval):
            group = layers[start : start + self.interval]
            if any(isinstance(layer, nn.Module) and any(True for _ in layer.parameters()) for _, layer in group):
                value = self.again(lambda value, group=group: self._run(group, value, round_), value)
            else:
                # As in DeepSpeed: such layers are cheap, and may change their input in place, as ReLU can, which would
                # then be lost.
                value = self._run(group, value, round_)
        return value

    def begin_step(self, micro_batches: int) -> None:
        """Counts forward passes from the number of micro batches that were trained on before: a resumed run draws what
        it would have drawn, whatever was evaluated in between."""
        self.passes = [micro_batches] * len(self.chunks)

    def _run(self, layers: Sequence[tuple[int, Callable[[Any], Any]]], value: Any, round_: int) -> Any:
        for number, layer in layers:
            if self.seed is not None:
                self.set_seed(self.seed * round_ + number)
            value = layer(value)
        return value


@dataclass(frozen=True)
class Received:
    """What the previous stage has sent. Strategies do not look inside, and so do not cast it."""

    value: Any
