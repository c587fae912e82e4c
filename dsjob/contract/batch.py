"""The batch triad: train_batch = micro_batch x grad_accum x data-parallel world size.

Derivation as DeepSpeed's (integer divisions, then a check of the product), so that a config means here what it means
there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsjob.contract.shown import shorten
from dsjob.errors import ConfigError, DocumentError, Problem

_KEYS = {  # ours, and DeepSpeed's
    "train_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
}
_ALLOWED = f"allowed are {', '.join(_KEYS)}, or {', '.join(_KEYS.values())}"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples a step (all ranks), samples a pass (one rank), passes a step. None: to be derived."""

    train_batch: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no whole number; whole floats (8.0) become integers."""
        wrong = []
        for name in _KEYS:
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                wrong.append(Problem(f"must be an integer, not {shorten(value)}", (name,), "type", "8, for example"))
        if wrong:
            raise ConfigError(wrong)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BatchSizes:
        """From the three keys as a job document or a DeepSpeed config spells them; "auto" counts as not given.

        Raises ConfigError for any other key.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                [Problem(f"batch sizes are made from a mapping, not {type(values).__name__}", rule="type")]
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
        """The batch sizes of a (checked) `trainer` section, its other keys left aside."""
        return cls.from_dict({name: section.get(name) for name in _KEYS})

    def resolve(
        self, world_size: int, *, name: Callable[[str], str] = lambda key: "", ranks: str = "", parts: int = 1
    ) -> BatchSizes:
        """All three numbers for `world_size` data-parallel ranks, each of which is `parts` ranks of the job.

        Raises DocumentError, naming the numbers and a change that would make them hold, where they do not multiply out.
        `name` and `ranks` say where a number that was given and the world size come from, to be put behind them.
        """
        full = self._complete(world_size)
        if full is None:
            raise _problem("needs train_batch or micro_batch", "trainer.micro_batch=8, for example")
        if not full.is_valid(world_size):
            train, *factors = (f"{key} {getattr(full, key)}{name(key) or self._tell_derived(key)}" for key in _KEYS)
            told = f"{train} is not {' x '.join(factors)} x world size {world_size}{f' ({ranks})' if ranks else ''}"
            raise _problem(told, full._remedy(world_size, parts))
        return full

    def is_valid(self, world_size: int) -> bool:
        """Whether all three are given, positive, and multiply out for `world_size`."""
        if self.train_batch is None or self.micro_batch is None or self.grad_accum is None:
            return False
        positive = min(self.train_batch, self.micro_batch, self.grad_accum) > 0
        return positive and self.train_batch == self.micro_batch * self.grad_accum * world_size

    def move_to(self, world_size: int) -> BatchSizes:
        """The same train_batch (all three are given) on `world_size` ranks, with no larger a micro batch.

        Without a solution grad_accum is left open, for `resolve` to explain.
        """
        assert self.train_batch is not None
        assert self.micro_batch is not None
        share, rest = divmod(self.train_batch, world_size)  # of a rank
        if rest or share < 1:
            return BatchSizes(self.train_batch, self.micro_batch)
        small = [number for number in range(1, math.isqrt(share) + 1) if share % number == 0]
        divisors = {*small, *(share // number for number in small)}
        micro = max(number for number in divisors if number <= max(self.micro_batch, 1))
        return BatchSizes(self.train_batch, micro, share // micro)

    def _complete(self, world_size: int) -> BatchSizes | None:
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

    def _tell_derived(self, key: str) -> str:
        """How a number came about that was not given."""
        if getattr(self, key) is not None:
            return ""
        both = self.train_batch is not None and self.micro_batch is not None
        return " (derived)" if both or key != "grad_accum" else " (the default)"

    def _remedy(self, world_size: int, parts: int) -> str:
        train, micro, accum = self.train_batch or 0, max(self.micro_batch or 0, 1), max(self.grad_accum or 0, 1)
        ways = []
        if train % (micro * accum) == 0:
            fitting = train // (micro * accum)
            ways.append(f"it holds for world size {fitting}: launch.nproc={fitting * parts}")
        if train % (micro * world_size) == 0:
            ways.append(f"or trainer.grad_accum={train // (micro * world_size)}")
        elif train % (accum * world_size) == 0:
            ways.append(f"or trainer.micro_batch={train // (accum * world_size)}")
        ways.append(f"or trainer.train_batch={micro * accum * world_size}")
        return ", ".join(ways).removeprefix("or ")


def _problem(message: str, hint: str) -> DocumentError:
    return DocumentError([Problem(message, ("trainer",), "batch", hint)])
