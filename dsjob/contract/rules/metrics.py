"""Rules about the metrics that a job names: that something computes them, and whether lower or higher is better."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from dsjob.contract.directions import falls
from dsjob.contract.rules.table import Document, Finding, enter, read

_EARLY_STOPPING = "dsjob.callbacks.EarlyStopping"
_KNOWING = ("torchmetrics.", "dsjob.")  # modules of metrics that have higher_is_better


def trains(document: Document) -> bool:
    """Whether training is one of the tasks."""
    return "train" in read(document, "tasks", ["train"])


def list_phases(document: Document) -> dict[str, list[str]]:
    """The phases (eval, train) in which each metric is computed."""
    metrics = read(document, "metrics", {})
    return {
        name: (metric.get("phases") if isinstance(metric, dict) else None) or ["eval"]
        for name, metric in metrics.items()
    }


@enter("unknown-metric", whole=True)
def _metric(document: Document) -> Iterator[Finding]:
    """A callback that monitors a metric which is never computed waits for ever."""
    if not trains(document):
        return  # neither callbacks nor the best checkpoint matter; the sets may be others than those of the training
    if _names_are_open(document):
        return
    losses = _list_losses(document)
    known = losses | set(_list_measured(document))
    there = f"available: {', '.join(sorted(known))}" if known else "add data.eval"
    for name, callback in read(document, "callbacks", {}).items():
        if not isinstance(callback, dict):
            continue
        if callback.get("_target_") == _EARLY_STOPPING:
            followed = callback.get("metric", "eval/loss")
            if isinstance(followed, str) and _leads_nowhere(followed, known, losses):
                place = f"callbacks.{name}{'.metric' if 'metric' in callback else ''}"
                near = difflib.get_close_matches(followed, sorted(known), n=1, cutoff=0.5)
                meant = f'did you mean "{near[0]}"? ' if near else ""
                yield place, f'unknown metric "{followed}"', f"{meant}{there}"
        monitored = callback.get("monitor")
        if isinstance(monitored, str) and monitored.startswith("eval/") and _leads_nowhere(monitored, known, losses):
            yield f"callbacks.{name}.monitor", f'unknown metric "{monitored}"', there
    best = read(document, "checkpoint.best")
    chosen = best.get("metric", "eval/loss") if _is_evaluated(document) and isinstance(best, dict) else None
    if isinstance(chosen, str) and _leads_nowhere(chosen, known, losses):
        yield "checkpoint.best.metric", f'unknown metric "{chosen}"', there


@enter("no-best", whole=True)
def _best(document: Document) -> Iterator[Finding]:
    """Which checkpoint is the best depends on a metric, which only `checkpoint.best` names."""
    section = read(document, "checkpoint", {})
    if read(document, "checkpoint.load_best_at_end") is True and "best" not in section:
        hint = "add checkpoint: {best: {metric: eval/loss}}"
        yield "checkpoint.load_best_at_end", "is set without checkpoint.best", hint


@enter("no-direction", whole=True)
def _direction(document: Document) -> Iterator[Finding]:
    """A run that does not know whether lower or higher values of a metric are better would keep the worst checkpoint.
    Names that end in loss, perplexity or error are known, and so are metrics with `higher_is_better`."""
    measured, losses = _list_measured(document), _list_losses(document)
    known = losses | set(measured)
    for place, metric in _list_undirected(document):
        unknown = not _names_are_open(document) and _leads_nowhere(metric, known, losses)  # reported already
        if not unknown and _find_target(metric, measured) is None:
            yield place, f'is unset, and "{metric}" does not say whether lower or higher is better', "write min or max"


@enter("direction-from-metric", severity="warning", whole=True)
def _direction_from_metric(document: Document) -> Iterator[Finding]:
    """The run takes the direction from the metric's `higher_is_better`. Without that, it ends before its first step."""
    measured = _list_measured(document)
    for place, metric in _list_undirected(document):
        target = _find_target(metric, measured)
        if target is not None and not target.startswith(_KNOWING):
            message = f"is unset: unless {target} has higher_is_better, the run ends before its first step"
            yield place, message, "write min or max"


@enter("greatest-loss", severity="warning", whole=True)
def _greatest_loss(document: Document) -> Iterator[Finding]:
    """The greatest loss is the worst one. A run would keep its worst checkpoint, or stop because it improves."""
    for place, section in _list_choosing(document):
        metric = section.get("metric", "eval/loss")
        if section.get("mode") == "max" and isinstance(metric, str) and falls(metric):
            yield f"{place}.mode", f"max chooses the greatest {metric}", "write mode: min"


def _list_choosing(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each section that compares values of a metric, and its place."""
    best = read(document, "checkpoint.best")
    if isinstance(best, dict):
        yield "checkpoint.best", best
    for name, callback in read(document, "callbacks", {}).items():
        if isinstance(callback, dict) and callback.get("_target_") == _EARLY_STOPPING:
            yield f"callbacks.{name}", callback


def _list_undirected(document: Document) -> Iterator[tuple[str, str]]:
    """The places where a mode is missing, and the metrics there, of which no name says whether lower is better."""
    for place, section in _list_choosing(document) if trains(document) and _is_evaluated(document) else ():
        metric = section.get("metric", "eval/loss")
        if "mode" not in section and isinstance(metric, str) and not falls(metric):
            yield f"{place}.mode", metric


def _is_evaluated(document: Document) -> bool:
    return "eval" in read(document, "data", {})


def _names_are_open(document: Document) -> bool:
    """Whether evaluations may return metrics whose names are not known before they run, or the data is broken, which is
    reported already."""
    data = read(document, "data", {"eval": None})
    own = read(document, "trainer.eval_step") or read(document, "trainer.parts")
    return bool(own) or ("eval" in data and data["eval"] is None)


def _list_prefixes(document: Document) -> list[str]:
    """The prefixes of the metrics of all evaluation sets: `eval`, or `eval/NAME` for each of several."""
    sets = read(document, "data.eval")
    if not isinstance(sets, dict):
        return []
    return ["eval"] if "_target_" in sets else [f"eval/{name}" for name in sets]


def _list_losses(document: Document) -> set[str]:
    parts = ["loss", *(f"loss/{name}" for name in read(document, "losses", {}))]
    return {f"{prefix}/{part}" for prefix in _list_prefixes(document) for part in parts}


def _list_measured(document: Document) -> dict[str, str]:
    """The target of each metric of `metrics` that evaluations compute, by the metric's whole name."""
    metrics, prefixes = read(document, "metrics", {}), _list_prefixes(document)
    targets = {name: metric.get("_target_", "") if isinstance(metric, dict) else "" for name, metric in metrics.items()}
    names = [name for name, phases in list_phases(document).items() if "eval" in phases]
    return {f"{prefix}/{name}": str(targets[name]) for prefix in prefixes for name in names}


def _find_target(metric: str, measured: dict[str, str]) -> str | None:
    """The target of a metric, or of the one that returns a dict with it; None if `metrics` has none."""
    return measured.get(metric, measured.get(metric.rpartition("/")[0]))


def _leads_nowhere(metric: str, known: set[str], losses: set[str]) -> bool:
    """Whether a metric is neither a known one nor `eval/NAME/KEY`, a key of the dict that a known one may return."""
    return metric not in known and metric.rpartition("/")[0] not in known - losses
