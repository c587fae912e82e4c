"""Decides which checkpoints to keep: the newest, every n-th, the best by a metric, and pinned ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjob.contract.directions import Direction
from dsjob.contract.spec import BestCheckpoints

Record = Mapping[str, Any]  # a commit record


@dataclass(frozen=True)
class Best:
    """Keeps the `keep` checkpoints with the lowest or highest value of a metric."""

    metric: str
    mode: Direction
    keep: int

    @classmethod
    def of(cls, section: BestCheckpoints | None, keep: int | None = None) -> Best | None:
        """By `checkpoint.best` of a job; None without it, or if nobody knows yet which values are better."""
        if section is None or section.mode is None:
            return None
        return cls(section.metric, section.mode, keep or section.keep)

    def choose(self, records: Sequence[Record]) -> list[Record]:
        """The best of `records`. Of equal ones, the older wins: the newer one is no improvement."""
        rated = [(self._rate(record.get("metrics", {})), record) for record in records]
        known = [(rate, int(record["step"]), record) for rate, record in rated if rate is not None]
        return [record for *_, record in sorted(known, key=lambda item: item[:2])[: self.keep]]

    def improves(self, metrics: Mapping[str, float], records: Sequence[Record]) -> bool:
        """Whether a checkpoint with these metrics would be among the best."""
        rate, best = self._rate(metrics), self.choose(records)
        if rate is None:
            return False
        rates = [found for record in best if (found := self._rate(record["metrics"])) is not None]
        return len(best) < self.keep or rate < max(rates)

    def _rate(self, metrics: Mapping[str, Any]) -> float | None:
        """The metric as a number where smaller is better; None if it is missing or not finite."""
        value = metrics.get(self.metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value) if self.mode == "min" else -float(value)


@dataclass(frozen=True)
class Retention:
    """Keeps the `newest` checkpoints (0: all), those at multiples of `every` steps (0: off), and the `best`."""

    newest: int = 0
    every: int = 0
    best: Best | None = None

    def expired(self, records: Sequence[Record], pinned: Collection[str]) -> list[Record]:
        """Those of `records` to delete. `records` must be in the order of their steps; the last one always stays."""
        # 0 keeps everything, so `every` and `best` have nothing to add.
        if not self.newest:
            return []
        stay = {record["tag"] for record in records[-self.newest :]} | set(pinned)
        stay |= {record["tag"] for record in records if self.every and record["step"] % self.every == 0}
        stay |= {record["tag"] for record in (self.best.choose(records) if self.best else [])}
        return [record for record in records if record["tag"] not in stay]
