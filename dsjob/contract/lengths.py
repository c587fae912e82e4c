"""Lengths in a document: a number of optimizer steps, or a text with a unit, such as `2ep`, `30min` or `1e6tok`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["steps", "epochs", "samples", "tokens", "seconds"]

# The units of Composer, and hours. One batch is one optimizer step.
_UNITS: dict[str, tuple[Unit, float]] = {
    "ba": ("steps", 1),
    "ep": ("epochs", 1),
    "sp": ("samples", 1),
    "tok": ("tokens", 1),
    "sec": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
}
# The zeros before it ensure that the amount is not 0.
PATTERN = r"^(?=[0.]*[1-9])[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?(ba|ep|sp|tok|sec|min|h)$"
_WORDS = {
    "ba": ("b", "bs", "bat", "batch", "batches", "it", "iter", "iters", "iterations", "st", "step", "steps"),
    "ep": ("e", "eps", "epoch", "epochs"),
    "sp": ("sample", "samples", "record", "records", "smp"),
    "tok": ("t", "toks", "token", "tokens"),
    "sec": ("s", "secs", "second", "seconds"),
    "min": ("m", "mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
}


@dataclass(frozen=True, slots=True)
class Length:
    """An amount of a unit. `text`: as the document has it."""

    amount: float
    unit: Unit
    text: str

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        return self.amount > 0

    def double(self, done: float = 0) -> str:
        """As a document has a length that is twice as long, and longer than what is `done` of its unit."""
        match = re.fullmatch(r"(.*?)([a-z]*)", self.text)
        assert match is not None
        doubled = 2 * float(match[1])
        return f"{doubled if doubled > done else 2 * math.ceil(done):.15g}{match[2]}"

    @property
    def measured(self) -> bool:
        """Whether only the run itself can tell how many steps it is."""
        return self.unit in ("tokens", "seconds")


def read_length(value: int | str) -> Length:
    """The length that a checked value of a document stands for; an integer counts steps."""
    if not isinstance(value, str):
        return Length(value, "steps", str(value))
    match = re.fullmatch(r"(.*?)([a-z]+)", value)
    assert match is not None
    unit, size = _UNITS[match[2]]
    return Length(float(match[1]) * size, unit, value)


def count_steps_of(value: Any) -> float | None:
    """The steps that a checked value of a document stands for, if it counts steps."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    length = read_length(value)
    return length.amount if length.unit == "steps" else None


def suggest_length(value: Any) -> str:
    """How to write a length whose unit is spelt in another way, such as `2 epochs`, or Determined's {epochs: 2}."""
    if isinstance(value, dict) and len(value) == 1:
        ((unit, amount),) = value.items()
    elif isinstance(value, str) and (
        match := re.fullmatch(r"\s*([0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    ):
        amount, unit = match.groups()
    else:
        return ""
    if not unit:
        return f"write {amount} without the quotes"
    known = {word: short for short, words in _WORDS.items() for word in (short, *words)}
    short = known.get(str(unit).lower(), "")
    written = f"{amount}{short}".replace("_", "")
    return f"write {written}" if short and re.fullmatch(PATTERN, written) else ""
