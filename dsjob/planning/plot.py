"""Draws small text plots: learning rates over steps, and curves of one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def draw(points: Sequence[tuple[int, float]], height: int = 6) -> list[str]:
    """The lines of the plot: one column per (step, value), `height` lines, and a line with the first and last step.

    The lowest line is zero, or the lowest value if any value is negative.
    """
    if not points:
        return []
    values = [value for _, value in points]
    high, low = max(values), min(0.0, *values)
    span = (high - low) or 1.0
    levels = [round((value - low) / span * (height - 1)) for value in values]
    labels = [f"{low + span * level / (height - 1):.2g}" for level in range(height)]
    width = max(map(len, labels))
    lines = [
        f"{labels[level]:>{width}} |" + "".join("*" if own == level else " " for own in levels).rstrip()
        for level in reversed(range(height))
    ]
    first, last = str(points[0][0]), str(points[-1][0])
    gap = max(1, len(points) - len(first) - len(last))
    return [*lines, " " * (width + 2) + first + " " * gap + last + "  step"]


def spark(values: Sequence[float], width: int) -> str:
    """A curve of one line with at most `width` characters: of more values, means. Values that are not finite are left
    out."""
    finite = [value for value in values if math.isfinite(value)]
    bins = min(width, len(finite))
    edges = [len(finite) * index // bins for index in range(bins + 1)] if bins else []
    means = [sum(finite[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)
