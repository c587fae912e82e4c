"""Why samples do not make a batch: the first one that does not go with the others, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

Named = list[tuple[str, Any]]  # samples, or what they have at one place, each with what to call it
Misfit = tuple[str, str]  # what is wrong, what to do

_PAD = "pad them in data.collate, which gets the samples of a batch as a list: {_target_: my_module.pad}"


def find_misfit(named: Named) -> Misfit | None:
    """The first sample that torch's default collate cannot put into a batch with the others; None where all fit."""
    for name, value in named:
        if value is None:
            return f"{name} is None", "leave such samples out of the dataset, or drop them in data.collate"
    if not named:
        return None
    first_name, first = named[0]
    for name, value in named[1:]:
        if _sort(value) != _sort(first):
            return f"{first_name} is {_describe(first)}, and {name} {_describe(value)}", "make all samples alike"
    if isinstance(first, Mapping):
        return _compare_keys(named) or _find_below(named, first)
    if isinstance(first, (list, tuple)):
        return _compare(named, len, "{} items") or _find_below(named, range(len(first)))
    if hasattr(first, "shape"):
        return _compare(named, lambda value: list(value.shape), "shape {}")
    if isinstance(first, (Number, str, bytes)):
        return None
    hint = "return tensors, arrays, numbers or texts, in dicts, lists or tuples; or make batches in data.collate"
    return f"{first_name} is {_describe(first)}, which has no place in a batch", hint


def _sort(value: Any) -> Any:
    """What has to be equal for two values to go together."""
    for kind in (Mapping, Number):
        if isinstance(value, kind):
            return kind
    return "array" if hasattr(value, "shape") else type(value)


def _describe(value: Any) -> str:
    kind = type(value)
    return f"of type {kind.__qualname__ if kind.__module__ == 'builtins' else f'{kind.__module__}.{kind.__qualname__}'}"


def _compare_keys(named: Named) -> Misfit | None:
    hint = "give every sample the same keys, or choose in data.collate what a batch has"
    first_name, first = named[0]
    for name, value in named[1:]:
        for key in first.keys() - value.keys():
            return f"{name} has no {key!r}, which {first_name} has", hint
        for key in value.keys() - first.keys():
            return f"{first_name} has no {key!r}, which {name} has", hint
    return None


def _compare(named: Named, measure: Callable[[Any], Any], text: str) -> Misfit | None:
    first_name, first = named[0]
    for name, value in named[1:]:
        if measure(value) != measure(first):
            sizes = f"{first_name} has {text.format(measure(first))}, {name} {text.format(measure(value))}"
            return f"the samples of a batch differ in size: {sizes}", _PAD
    return None


def _find_below(named: Named, keys: Iterable[Any]) -> Misfit | None:
    found = (find_misfit([(f"{name}[{key!r}]", value[key]) for name, value in named]) for key in keys)
    return next((one for one in found if one is not None), None)
