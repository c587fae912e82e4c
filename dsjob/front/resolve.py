"""Resolves a composed document for the number of ranks that it would run on."""

from __future__ import annotations

from dataclasses import replace

from dsjob.contract import schema as contract
from dsjob.document.origins import Composed
from dsjob.document.resolve import Resolved, resolve_job
from dsjob.document.sizes import choose_world_size
from dsjob.front.unnamed import complete
from dsjob.launch import launcher


def resolve_composed(composed: Composed, world_size: int | None = None) -> Resolved:
    """The resolved document. Accepts a bare DeepSpeed config. `world_size`: overrides the number of ranks."""
    world_size, ranks_from = choose_world_size(
        composed.document, composed.locate, asked=world_size, started=launcher.read_world_size()
    )
    if "deepspeed" in composed.document and not {"model", "data"} & composed.document.keys():
        return _resolve_bare(composed, world_size, ranks_from)
    return resolve_job(composed.document, world_size=world_size, locate=composed.locate, ranks_from=ranks_from)


def _resolve_bare(composed: Composed, world_size: int, ranks_from: str) -> Resolved:
    """Resolves a bare DeepSpeed config. The result has only the keys that such a config determines."""
    completed = complete(composed.document)
    resolved = resolve_job(completed, world_size=world_size, locate=composed.locate, ranks_from=ranks_from)
    # Jobs and DeepSpeed configs both have a section `checkpoint`, with different meanings.
    shared = contract.deepspeed_schema()["properties"].keys() - {"checkpoint"}
    document = {key: value for key, value in resolved.document.items() if key in shared}
    said = {"train_batch", "micro_batch", "grad_accum", *composed.document.get("trainer", {})}
    document["trainer"] = {key: value for key, value in resolved.document["trainer"].items() if key in said}
    if "optimizer" not in composed.document["deepspeed"]:
        del document["optimizer"]
    return replace(resolved, document=contract.sort_keys(document, contract.job_schema()))
