"""Limits the size of overrides: Hydra takes quadratic time for lists, and looks for a file named after each key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from dsjob.contract.bounds import MAX_DEPTH
from dsjob.errors import UsageError

MAX_KEY: Final = 250  # bytes; most file systems limit names to 255
MAX_ITEMS: Final = 2_000  # in the lists, dicts and choices of all overrides together
MAX_RUNS: Final = 10_000  # of a sweep over all combinations
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


def require_small(overrides: Sequence[str]) -> None:
    """Raises UsageError for overrides on which Hydra would take minutes or fail."""
    items = 0
    for override in overrides:
        key, _, value = override.partition("=")
        if len(key.encode()) > MAX_KEY or key.count(".") >= MAX_DEPTH:
            raise UsageError(
                f"the key of an override has {len(key.encode()):,} bytes and {key.count('.') + 1:,} parts;"
                f" the limits are {MAX_KEY} and {MAX_DEPTH}: {key[:40]}...",
                hint="write deep structures in the job file",
            )
        commas = _QUOTED.sub("", value).count(",")
        items += commas + 1 if commas else 0
    if items > MAX_ITEMS:
        raise UsageError(
            f"the overrides hold {items:,} items of lists; the limit is {MAX_ITEMS:,}",
            hint="write long lists in the job file",
        )


def require_few_runs(count: float) -> None:
    """Raises UsageError if a sweep has more than `MAX_RUNS` runs."""
    if count > MAX_RUNS:
        raise UsageError(
            f"the sweep has {count:,.0f} runs; the limit is {MAX_RUNS:,}",
            hint="give a range larger steps, such as range(1,100,10), or sample it with hydra/sweeper=optuna",
        )
