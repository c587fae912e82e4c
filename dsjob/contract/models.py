"""Several models in one document: the settings of each one, merged from the job's and its own.

A model's sections are merged with the job's key by key; its optimizer or scheduler replaces the job's completely. The
document itself stays unmerged, so that an override of a job setting still applies to every model in a resolved
document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOLE = "model"  # the name of the engine of a job with one model


def list_models(document: Mapping[str, Any]) -> list[str]:
    """The names of the models; the first one counts steps and samples."""
    models = document.get("models")
    return list(models) if isinstance(models, dict) and models else [SOLE]


def take_model(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`document`, which may be incomplete, as it would be if it had only this one of its models.

    The model's settings override the job's key by key. Its optimizer or scheduler replaces the job's as a whole,
    because arguments of one type do not fit another.
    """
    models = document.get("models")
    if not isinstance(models, dict) or not models:
        return dict(document)
    alone = {key: value for key, value in document.items() if key != "models"}
    for key, own in models[name].items():
        alone[key] = own if key in ("model", "optimizer", "scheduler") else _merge(alone.get(key), own)
    alone.pop("trainable", None)
    if not is_trainable(document, name):
        alone = {key: value for key, value in alone.items() if key not in ("optimizer", "scheduler")}
    return alone


def _merge(common: Any, own: Any) -> Any:
    if not (isinstance(common, dict) and isinstance(own, dict)):
        return own
    return {**common, **{key: _merge(common.get(key), value) for key, value in own.items()}}


def is_trainable(document: Mapping[str, Any], name: str) -> bool:
    """Whether a model of the document is trained."""
    models = document.get("models")
    return not models or models[name].get("trainable", True) is not False
