"""Divides the layers of a model among the stages of a pipeline. Only arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsjob.errors import UsageError

METHODS = "parameters, uniform, type:REGEX or time"
SAME = {"best": "parameters"}  # DeepSpeed's other names of a method


def partition(
    method: str,
    stages: int,
    *,
    names: Sequence[str],
    parameters: Sequence[int],
    seconds: Sequence[float] | None = None,
) -> list[int]:
    """The first layer of each stage, and the number of layers at the end: `stages` + 1 numbers.

    method: what is divided evenly: the trained parameters, the layers (uniform), those whose class name matches a
    regular expression (type:REGEX, in any case), or the time that each takes. names: of the layers' classes.
    parameters: trained ones of each layer. seconds: that each layer takes; needed for `time` alone. Raises UsageError
    for another method, and for fewer layers than stages.
    """
    method = SAME.get(method.lower(), method)
    kind, _, pattern = method.partition(":")
    kind, count = kind.lower(), len(names)
    if count < stages:
        raise UsageError(
            f"{count} layer{'s' * (count != 1)} cannot be divided among {stages} stages",
            hint="each stage needs a layer: use fewer stages",
        )
    if kind == "uniform":
        return [number * count // stages for number in range(stages + 1)]
    if kind == "parameters":
        return balance(parameters, stages)
    if kind == "time":
        if seconds is None:
            raise UsageError(
                "pipeline partition time measures layers, but the model is not an nn.Sequential or dsjob.Layers",
                hint="use parameters, uniform or type:REGEX",
            )
        return balance(seconds, stages)
    if kind == "type" and pattern:
        try:
            matches = [bool(re.search(pattern, name, re.IGNORECASE)) for name in names]
        except re.error as error:
            raise UsageError(f"pipeline partition {method}: {error}") from error
        if not any(matches):
            listed = ", ".join(dict.fromkeys(names))
            raise UsageError(f"pipeline partition {method}: no layer matches", hint=f"their classes are {listed}")
        return balance([int(each) for each in matches], stages)
    raise UsageError(f"pipeline partition {method} is unknown", hint=f"use {METHODS}")


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Cuts a sequence into `parts` runs of at least one item, so that the largest sum of a run is as small as possible.

    Returns the first index of each run, and the length. Of equally good cuts, takes the one whose runs are most even,
    first in their sums and then in their lengths.
    """
    count = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[n], for the first n items in the present number of runs: (largest sum, sum of squares, squares of lengths).
    best = [(0.0, 0.0, 0), *[_NEVER] * count]
    begins = []  # for each number of runs, where the last one begins, by its end
    for part in range(parts):
        found, begin = [_NEVER] * (count + 1), [0] * (count + 1)
        for end in range(part + 1, count - (parts - part - 1) + 1):
            for start in range(part, end):
                own, (largest, squares, lengths) = sums[end] - sums[start], best[start]
                cost = (max(largest, own), squares + own * own, lengths + (end - start) ** 2)
                if cost < found[end]:
                    found[end], begin[end] = cost, start
        best = found
        begins.append(begin)
    bounds = [count]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return bounds[::-1]


_NEVER = (float("inf"), float("inf"), 0)
