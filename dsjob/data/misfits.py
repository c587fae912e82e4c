"""Explains why samples cannot be collated: finds the first one that does not match the others, and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

Named = list[tuple[str, Any]]  # samples, or their values below one key, each with its name for messages
Misfit = tuple[str, str]  # what is wrong, what to do

_PAD = "pad them in data.collate, which receives the samples of a batch as a list: {_target_: my_module.pad}"

_PAD_TEXT = "pad them: data.collate={_target_: dsjob.text.Pad}"


def find_misfit(named: Named) -> Misfit | None:
    """The first sample that torch's default collate cannot batch with the others; None if all match."""
    # None first: as a difference in type, it would get a less helpful message.
    for name, value in named:
        if value is None:
            return f"{name} is None", "remove such samples from the dataset, or drop them in data.collate"
    if not named:
        return None
    first_name, first = named[0]
    for name, value in named[1:]:
        if _sort(value) != _sort(first):
            hint = "return the same type from every sample"
            return f"{first_name} is {_describe(first)}, but {name} is {_describe(value)}", hint
    if isinstance(first, Mapping):
        # Compare the values of each key, with names such as data.train[3]['image'].
        return _compare_keys(named) or _find_below(named, first)
    if isinstance(first, (list, tuple)):
        return _compare(named, len, "{} items") or _find_below(named, range(len(first)))
    if hasattr(first, "shape"):
        return _compare(named, lambda value: list(value.shape), "shape {}")
    if isinstance(first, (Number, str, bytes)):
        return None
    hint = "return tensors, arrays, numbers or strings, in dicts, lists or tuples; or build batches in data.collate"
    return f"{first_name} is {_describe(first)}, which cannot be batched", hint


def _sort(value: Any) -> Any:
    """A key that is equal for values of compatible types."""
    for kind in (Mapping, Number):
        if isinstance(value, kind):
            return kind
    return "array" if hasattr(value, "shape") else type(value)


def _describe(value: Any) -> str:
    kind = type(value)
    return f"of type {kind.__qualname__ if kind.__module__ == 'builtins' else f'{kind.__module__}.{kind.__qualname__}'}"


def _compare_keys(named: Named) -> Misfit | None:
    hint = "give every sample the same keys, or select keys in data.collate"
    first_name, first = named[0]
    for name, value in named[1:]:
        for key in first.keys() - value.keys():
            return f"{name} lacks the key {key!r}, which {first_name} has", hint
        for key in value.keys() - first.keys():
            return f"{first_name} lacks the key {key!r}, which {name} has", hint
    return None


def _compare(named: Named, measure: Callable[[Any], Any], text: str) -> Misfit | None:
    first_name, first = named[0]
    for name, value in named[1:]:
        if measure(value) != measure(first):
            sizes = f"{first_name} has {text.format(measure(first))}, {name} has {text.format(measure(value))}"
            return f"the samples of a batch differ in size: {sizes}", _PAD_TEXT if "['input_ids']" in name else _PAD
    return None


def _find_below(named: Named, keys: Iterable[Any]) -> Misfit | None:
    found = (find_misfit([(f"{name}[{key!r}]", value[key]) for name, value in named]) for key in keys)
    return next((one for one in found if one is not None), None)
