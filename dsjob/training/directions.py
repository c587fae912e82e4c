"""Whether a lower or a higher value of a metric is better, as the metric itself says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsjob.contract.directions import Direction, falls
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec
from dsjob.errors import ContractError

_BETTER = {"min": "lower", "max": "higher"}


def settle_best(job: ResolvedJob, metrics: Mapping[str, Any], say: Callable[[str, str], None]) -> ResolvedJob:
    """The job with a `checkpoint.best.mode`.

    metrics: the objects of the document's metrics by name. say: shows a title and a text to the user; here, that the
    job contradicts the metric. Raises ContractError if nothing says which values are better.
    """
    best = job.spec.checkpoint.best
    if best is None:
        return job
    found = find_direction(best.metric, job.spec, metrics)
    if best.mode is None:
        return job.choosing(require_direction(best.metric, found, ("checkpoint", "best", "mode")))
    if found not in (None, best.mode) and not falls(best.metric):  # of names, a rule warns
        say("note", f"checkpoint.best.mode is {best.mode}, but of {best.metric}, {_BETTER[found]} values are better")
    return job


def require_best(spec: JobSpec, metrics: Mapping[str, Any]) -> None:
    """Raises ContractError if `checkpoint.best` needs to know which values of one of `metrics` are better, and that
    does not say so."""
    best = spec.checkpoint.best
    if best is None or best.mode is not None:
        return
    for _ in _find_made(best.metric, spec, metrics):
        require_direction(best.metric, find_direction(best.metric, spec, metrics), ("checkpoint", "best", "mode"))


def require_direction(metric: str, found: Direction | None, where: tuple[str, ...] = ()) -> Direction:
    """`found`. Raises ContractError, at `where` in the document, if it is None."""
    if found is None:
        error = ContractError(
            f"{metric} does not say whether lower or higher values are better",
            hint="set mode: max if higher is better, else mode: min",
        )
        error.put_at(where)
        raise error
    return found


def find_direction(metric: str, spec: JobSpec, metrics: Mapping[str, Any]) -> Direction | None:
    """Which values of a metric are better, by its whole name, such as `eval/f1`, or by `higher_is_better` of its
    object. None if neither says so."""
    if falls(metric):
        return "min"
    for made in _find_made(metric, spec, metrics):
        higher = getattr(made, "higher_is_better", None)
        return None if not isinstance(higher, bool) else "max" if higher else "min"
    return None


def _find_made(metric: str, spec: JobSpec, metrics: Mapping[str, Any]) -> Iterator[Any]:
    """The object of a metric: in a collection, that of the metric's last part. Nothing if it comes from elsewhere."""
    for prefix in spec.data.list_sets("eval"):
        for name, made in metrics.items():
            key = metric.removeprefix(f"{prefix}/{name}")
            if key == metric or key[:1] not in ("", "/"):
                continue
            if key and hasattr(made, "keys") and key[1:] in made.keys():  # noqa: SIM118 (a collection of torchmetrics)
                yield made[key[1:]]
            else:
                yield getattr(made, "func", made)  # of a bound function, the function
