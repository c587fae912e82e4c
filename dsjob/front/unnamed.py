"""Completes documents without a model or data, for commands that need neither."""

from __future__ import annotations

from typing import Any

from dsjob.contract.deepspeed_keys import BATCH_KEYS

_UNNAMED: dict[str, Any] = {
    "model": {"_target_": "not.named"},
    "data": {"train": {"_target_": "not.named"}},
    "optimizer": {"type": "AdamW"},
}


def complete(document: dict[str, Any], *, micro_batch: int | None = None) -> dict[str, Any]:
    """A composed document with placeholders for a missing model, data, optimizer and length of the run.

    `micro_batch`: used if the document has no batch size.
    """
    trainer, config = document.get("trainer", {}), document.get("deepspeed")
    given = {**trainer, **(config if isinstance(config, dict) else {})}
    sized = {key for key, value in given.items() if value != "auto"} & {"train_batch", "micro_batch", *BATCH_KEYS[:2]}
    made = {"max_steps": 1, **({} if sized or micro_batch is None else {"micro_batch": micro_batch})}
    rest = {key: value for key, value in document.items() if key != "models"}
    return {**_UNNAMED, **rest, "trainer": {**made, **trainer}}
