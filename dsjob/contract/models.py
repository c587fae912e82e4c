"""Several models in one document: what each of them is alone, the job's own settings and its own put together.

A model's own section is merged key by key; an optimizer or scheduler is replaced whole. The document keeps only what a
model says itself, so a resolved document still follows an override of the job's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOLE = "model"  # the name of the engine of a job with one model


def list_models(document: Mapping[str, Any]) -> list[str]:
    """The names of the models, the one that counts first."""
    models = document.get("models")
    return list(models) if isinstance(models, dict) and models else [SOLE]


def take_model(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`document` as it would be for this one of its models alone; it need not be complete.

    What the model says goes over what the job says, key by key, but an optimizer or scheduler replaces the job's:
    arguments of one type are not those of another.
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
