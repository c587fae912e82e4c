"""Reads the curves in metrics.jsonl, thinned, so that a file of any size costs little memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from dsjob.errors import StorageError
from dsjob.files import open_read
from dsjob.run_folder import METRICS_NAME, read_record

BUCKETS = 1000  # of a curve, at most; each keeps its lowest and its highest point
_LONGEST = 1 << 20  # bytes of a line; a longer one is no record

Point = tuple[float, float]  # step, value


class Curve:
    """The values of one metric over steps, thinned while they arrive.

    Buckets have the same number of points. When there are more than BUCKETS, neighbours are merged, so that memory does
    not grow with the number of points, and every peak stays visible.
    """

    def __init__(self) -> None:
        self.count = 0  # finite points
        self.not_finite = 0
        self.last: Point | None = None
        self._size = 1  # points in each bucket
        self._buckets: list[tuple[Point, Point]] = []  # lowest and highest point

    def add(self, step: float, value: float) -> None:
        """Appends a point. One that is not finite is only counted."""
        if not math.isfinite(value):
            self.not_finite += 1
            return
        point = (step, value)
        if self.count % self._size:
            low, high = self._buckets[-1]
            if value < low[1] or value > high[1]:
                self._buckets[-1] = (point, high) if value < low[1] else (low, point)
        else:
            if len(self._buckets) == BUCKETS:
                self._merge()
            self._buckets.append((point, point))
        self.count += 1
        self.last = point

    def _merge(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [(min(a[0], b[0], key=_get_value), max(a[1], b[1], key=_get_value)) for a, b in pairs]
        self._size *= 2

    def list_points(self) -> list[Point]:
        """At most 2 * BUCKETS + 1 points in the order of their steps, the last one included."""
        points = [point for bucket in self._buckets for point in sorted(set(bucket))]
        return points if self.last is None or points[-1] == self.last else [*points, self.last]


def _get_value(point: Point) -> float:
    return point[1]


def read_curves(folder: str) -> dict[str, Curve]:
    """The curves of a run by the names of their metrics, read line by line.

    Lines that are not complete records are skipped. Raises StorageError if metrics.jsonl is not a regular file.
    """
    path, curves = os.path.join(folder, METRICS_NAME), dict[str, Curve]()
    if not os.path.lexists(path):
        return curves
    with open_read(path) as raw, open(os.dup(raw.fileno()), "rb", buffering=1 << 20) as file:
        try:
            while line := file.readline(_LONGEST):
                _add_record(curves, read_record(line))
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return curves


def _add_record(curves: dict[str, Curve], record: Mapping[str, Any]) -> None:
    step = record.get("step")
    if type(step) is not int:
        return
    for name, value in record.items():
        if name == "step" or (value is not None and type(value) not in (int, float)):
            continue
        curve = curves.get(name)
        if curve is None:
            curve = curves[name] = Curve()
        try:
            curve.add(step, math.nan if value is None else float(value))  # null stands for nan and inf
        except OverflowError:
            curve.not_finite += 1
