"""Chooses values of a batch, or of a model's output, by the keys that the document lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dsjob.contract.paths import Path
from dsjob.errors import ContractError, name_target

WHOLE = "."  # the key of the whole value


def find_logits(outputs: Any) -> Any:
    """A model's output if it is a tensor, or else its `logits`; None without them."""
    if isinstance(outputs, Tensor):
        return outputs
    return outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)


def describe_output(outputs: Any) -> str:
    """What a model returned, for messages."""
    return f"a dict of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__


class Chosen(NamedTuple):
    """Values, as the positional and the keyword arguments of a call."""

    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}

    @property
    def value(self) -> Any:
        """The value itself if there is a single one; else the tuple or the dict of all."""
        values = (*self.args, *self.keywords.values())
        return values[0] if len(values) == 1 else self.args or dict(self.keywords)


class Selection:
    """The values at `keys`, from the document's section `where`. what: what they are read from, for messages."""

    def __init__(self, keys: Any, where: Path, what: str) -> None:
        self._named = isinstance(keys, Mapping)
        self._keys: list[tuple[Any, Any]] = list(keys.items() if self._named else enumerate(keys))
        self._where, self._what = where, what

    @property
    def tops(self) -> list[Any]:
        """The keys as they are, except those of values further inside."""
        return [key for _, key in self._keys if not (isinstance(key, str) and "." in key)]

    def read(self, value: Any) -> Chosen:
        """The chosen values. Raises ContractError for a key that does not exist, with its place in the document."""
        found = [(name, self._find(value, name, key)) for name, key in self._keys]
        return Chosen((), dict(found)) if self._named else Chosen(tuple(item for _, item in found))

    def name(self, value: Any) -> dict[str, Any]:
        """The chosen values by the names of the arguments or, in a list, by their keys."""
        chosen = self.read(value)
        names = [str(name if self._named else key) for name, key in self._keys]
        return dict(zip(names, (*chosen.args, *chosen.keywords.values()), strict=True))

    def _find(self, value: Any, name: Any, key: Any) -> Any:
        if key == WHOLE:
            return value
        # A key of the value itself comes first, since it may contain a dot.
        inside = isinstance(value, Mapping) and key in value
        parts = [key] if inside or isinstance(key, int) else str(key).split(".")
        for number, part in enumerate(parts):
            above = ".".join([self._what, *parts[:number]])
            try:
                value = descend(value, part, above)
            except KeyError as error:
                where = (*self._where, name)
                failed = ContractError(f"{name_target(where)}: {error.args[0]}", hint=self._advise(value))
                failed.put_at(where)
                raise failed from None
        return value

    def _advise(self, value: Any) -> str:
        return f'for {self._what} that is a tensor, write "{WHOLE}"' if isinstance(value, Tensor) else ""


def descend(found: Any, step: str | int, above: str) -> Any:
    """The value `step` (a key, an index, or an attribute) of `found`. above: what `found` is, for messages.

    Raises KeyError with a message that lists what there is.
    """
    if isinstance(found, Mapping):
        if step in found:
            return found[step]
        if str(step).isdigit() and int(step) in found:
            return found[int(step)]
        there = ", ".join(map(str, found)) or "nothing"
    elif isinstance(found, Sequence) and not isinstance(found, str) and _is_index(step):
        if -len(found) <= int(step) < len(found):
            return found[int(step)]
        there = f"{len(found)} elements"
    else:
        value = getattr(found, str(step), None)
        if value is not None and not callable(value):
            return value
        there = ", ".join(_list_attributes(found))
    raise KeyError(f"{above}, of type {type(found).__name__}, has no {step!r}{there and f', but {there}'}")


def _is_index(step: str | int) -> bool:
    return str(step).removeprefix("-").isdigit()


def _list_attributes(found: Any) -> Iterator[str]:
    if isinstance(found, Tensor):
        return iter(())
    if isinstance(found, Sequence) and not isinstance(found, str):
        return iter(getattr(found, "_fields", [f"{len(found)} elements"]))
    return iter(vars(found) if hasattr(found, "__dict__") else ())
