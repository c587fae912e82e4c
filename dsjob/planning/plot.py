"""Draws learning rates over steps as a small text plot."""

from __future__ import annotations

from collections.abc import Sequence


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
