"""Normalises a document: current spellings, whole numbers as integers, and a value for every key.

All code that reads values works on normalised documents. So only this step handles old spellings, "auto" and defaults.
"""

from __future__ import annotations

from typing import Any

from dsjob.contract import legacy
from dsjob.contract import schema as contract
from dsjob.contract.gpus import read_gpus
from dsjob.contract.paths import Path
from dsjob.contract.schema import Schema
from dsjob.document.auto import resolve_auto

_OF_TORCH = 0.01  # the default weight_decay of torch.optim.AdamW


def normalise(document: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """A document with current keys, and with integers where `schema` requires them. It need not be valid."""
    normal: dict[str, Any] = use_integers(_rename(legacy.map_amp(legacy.expand(document)), schema), schema)
    return normal


def complete(job: dict[str, Any]) -> tuple[dict[str, Any], dict[Path, str]]:
    """A checked and normalised job with a value for every key, and a text by path on how each "auto" was resolved."""
    job, derived = resolve_auto(settle_torch_adam(job))
    job = {**job, "launch": _settle_gpus(job.get("launch", {}))} if "launch" in job else job
    return contract.fill_defaults(job, contract.job_schema()), derived


def _settle_gpus(launch: dict[str, Any]) -> dict[str, Any]:
    """The section `launch` with lists of GPUs, and with a rank for each GPU that `include` names."""
    settled = dict(launch)
    for key in ("include", "exclude"):
        if key in launch and (named := read_gpus(launch[key], f"launch.{key}")) is not None:
            settled[key] = named
        else:  # all GPUs of this machine
            settled.pop(key, None)
    if "include" in settled:
        settled.setdefault("nproc", len(settled["include"]))
    return settled


def settle_torch_adam(document: dict[str, Any]) -> dict[str, Any]:
    """A document whose optimizer has torch's default weight decay where DeepSpeed would build torch's AdamW."""
    method = document.get("optimizer")
    method = method if isinstance(method, dict) else {}
    params = method.get("params")
    if not isinstance(params, dict) or params.get("torch_adam") is not True:
        return document
    kind, decoupled = str(method.get("type", "")).lower(), params.get("adam_w_mode", True)
    if kind == "adamw" or (kind == "adam" and decoupled):
        return {**document, "optimizer": {**method, "params": {"weight_decay": _OF_TORCH, **params}}}
    return document


def use_integers(value: Any, schema: Schema) -> Any:
    """Converts whole floats (5e8) to integers where the schema requires integers.

    For an optimizer's arguments this needs its `type`, which selects their schema.
    """
    if schema.get("type") in ("integer", ["integer", "string"]) and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: use_integers(item, contract.child(schema, key, value) or {}) for key, item in value.items()}
    return value


def _rename(value: Any, schema: Schema) -> Any:
    if not isinstance(value, dict):
        return value
    renamed = {}
    for key, item in value.items():
        below = contract.child(schema, key, value)
        name = below.get("x-alias-of", key) if below else key
        renamed[name] = _rename(item, below) if below else item
    return renamed
