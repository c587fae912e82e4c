"""Several models in one document: what each of them is alone, the job's own settings and its own put together."""

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

    A section of the model's own goes over the job's key by key, but an optimizer or scheduler replaces it: arguments
    of one type are not those of another.
    """
    models = document.get("models")
    if not isinstance(models, dict) or not models:
        return dict(document)
    alone = {key: value for key, value in document.items() if key != "models"}
    for key, own in models[name].items():
        common = alone.get(key)
        if isinstance(own, dict) and isinstance(common, dict) and key not in ("model", "optimizer", "scheduler"):
            own = {**common, **own}
        alone[key] = own
    trainable = alone.pop("trainable", True)
    if not trainable:
        alone = {key: value for key, value in alone.items() if key not in ("optimizer", "scheduler")}
    return alone


def is_trainable(document: Mapping[str, Any], name: str) -> bool:
    """Whether a model of the document is trained."""
    models = document.get("models")
    return not models or models[name].get("trainable", True) is not False
