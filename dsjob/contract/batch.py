"""The batch triad: train_batch = micro_batch x grad_accum x data-parallel world size.

Missing sizes are derived as in DeepSpeed (integer divisions, then a check of the product), so that a config has the
same meaning in both.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsjob.contract.shown import shorten
from dsjob.errors import ConfigError, DocumentError, Problem

_KEYS = {  # dsjob's name -> DeepSpeed's name
    "train_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
}
_ALLOWED = f"available: {', '.join(_KEYS)}, {', '.join(_KEYS.values())}"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The three batch sizes; None: to be derived.

    `train_batch`: samples per optimizer step on all ranks. `micro_batch`: samples per forward and backward pass of one
    rank. `grad_accum`: passes per optimizer step.
    """

    train_batch: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError if a size is not a whole number. Converts whole floats (8.0) to integers."""
        wrong = []
        for name in _KEYS:
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                wrong.append(Problem(f"must be an integer, but is {shorten(value)}", (name,), "type", "for example 8"))
        if wrong:
            raise ConfigError(wrong)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BatchSizes:
        """From a mapping with the keys of a job document or of a DeepSpeed config; "auto" counts as unset.

        Raises ConfigError for any other key.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                [Problem(f"batch sizes must be a mapping, but are of type {type(values).__name__}", rule="type")]
            )
        ours = {theirs: name for name, theirs in _KEYS.items()} | {name: name for name in _KEYS}
        unknown = [key for key in values if key not in ours]
        if unknown:
            hints = {key: difflib.get_close_matches(str(key), ours, n=1) for key in unknown}
            raise ConfigError(
                [
                    Problem("unknown key", (key,), "unknown-key", f'did you mean "{near[0]}"?' if near else _ALLOWED)
                    for key, near in hints.items()
                ]
            )
        given = {ours[key]: value for key, value in values.items() if value is not None and value != "auto"}
        return cls(**given)

    @classmethod
    def of_trainer(cls, section: Mapping[str, Any]) -> BatchSizes:
        """The batch sizes of a (checked) `trainer` section, whose other keys are ignored."""
        return cls.from_dict({name: section.get(name) for name in _KEYS})

    def resolve(
        self, world_size: int, *, name: Callable[[str], str] = lambda key: "", ranks: str = "", parts: int = 1
    ) -> BatchSizes:
        """All three sizes for `world_size` data-parallel ranks. Each of these consists of `parts` model-parallel ranks.

        Raises DocumentError if the sizes do not multiply out; the message names the numbers and a change that would
        fix them. `name` and `ranks` return where a given size and the world size come from, for the message.
        """
        full = self._complete(world_size)
        if full is None:
            raise _problem(
                "the batch size is missing", "set train_batch or micro_batch, for example trainer.micro_batch=8"
            )
        if not full.is_valid(world_size):
            train, *factors = (f"{key} {getattr(full, key)}{name(key) or self._describe_origin(key)}" for key in _KEYS)
            origin = f" ({ranks})" if ranks else ""
            alone = self.micro_batch is None and self.grad_accum is None
            if alone and (full.train_batch or 0) > world_size:
                message = f"{train} does not divide evenly among {world_size} data-parallel ranks{origin}"
            elif 0 < (full.train_batch or 0) < world_size:
                message = f"{train} is smaller than the number of data-parallel ranks, {world_size}{origin}"
            else:
                message = f"{train} is not {' x '.join(factors)} x world size {world_size}{origin}"
            raise _problem(message, full._remedy(world_size, parts))
        return full

    def is_valid(self, world_size: int) -> bool:
        """Whether all three are set, positive, and multiply out for `world_size`."""
        if self.train_batch is None or self.micro_batch is None or self.grad_accum is None:
            return False
        positive = min(self.train_batch, self.micro_batch, self.grad_accum) > 0
        return positive and self.train_batch == self.micro_batch * self.grad_accum * world_size

    def move_to(self, world_size: int) -> BatchSizes:
        """The sizes for another `world_size`: the same train_batch, and the largest micro batch that divides a rank's
        share and is not larger than the present one. All three sizes must be set.

        If there is no solution, grad_accum stays None, and `resolve` raises the error that explains it.
        """
        assert self.train_batch is not None
        assert self.micro_batch is not None
        share, rest = divmod(self.train_batch, world_size)  # samples per rank and step
        if rest or share < 1:
            return BatchSizes(self.train_batch, self.micro_batch)
        small = [number for number in range(1, math.isqrt(share) + 1) if share % number == 0]
        divisors = {*small, *(share // number for number in small)}
        micro = max(number for number in divisors if number <= max(self.micro_batch, 1))
        return BatchSizes(self.train_batch, micro, share // micro)

    def _complete(self, world_size: int) -> BatchSizes | None:
        """All three sizes, which may not multiply out; None if there is nothing to derive them from."""
        train, micro, accum = self.train_batch, self.micro_batch, self.grad_accum
        if train is not None and micro is not None:
            return self if accum is not None else replace(self, grad_accum=train // max(micro, 1) // world_size)
        if train is not None:
            accum = accum if accum is not None else 1
            return BatchSizes(train, train // world_size // max(accum, 1), accum)
        if micro is not None:
            accum = accum if accum is not None else 1
            return BatchSizes(micro * accum * world_size, micro, accum)
        return None

    def _describe_origin(self, key: str) -> str:
        """Where a size that was not given comes from, for a message."""
        if getattr(self, key) is not None:
            return ""
        both = self.train_batch is not None and self.micro_batch is not None
        return " (derived)" if both or key != "grad_accum" else " (the default)"

    def _remedy(self, world_size: int, parts: int) -> str:
        """A hint with every single change that makes these sizes multiply out."""
        train, micro, accum = self.train_batch or 0, max(self.micro_batch or 0, 1), max(self.grad_accum or 0, 1)
        ways = []
        if train % (micro * accum) == 0:
            fitting = train // (micro * accum)
            ways.append(f"use launch.nproc={fitting * parts} (world size {fitting})")
        if train % (micro * world_size) == 0:
            ways.append(f"or trainer.grad_accum={train // (micro * world_size)}")
        elif train % (accum * world_size) == 0:
            ways.append(f"or trainer.micro_batch={train // (accum * world_size)}")
        ways.append(f"or trainer.train_batch={micro * accum * world_size}")
        hint = ", ".join(ways).removeprefix("or ")
        return hint if hint.startswith("use ") else f"use {hint}"


def _problem(message: str, hint: str) -> DocumentError:
    return DocumentError([Problem(message, ("trainer",), "batch", hint)])
