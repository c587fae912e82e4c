"""What `convert --to hf` writes: a model for transformers, an adapter for peft, or a model with the adapter merged.

The names and shapes are compared with the architecture's own before anything is written; torch is imported for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsjob.checkpoint import zero_to_fp32 as plain
from dsjob.checkpoint.adapters import (
    Adapter,
    Array,
    Merged,
    Shapes,
    find_adapter,
    find_updates,
    list_adapters,
    name_lora,
    name_merged,
)
from dsjob.checkpoint.pretrained import make_files
from dsjob.checkpoint.rounding import DTYPES, Rounded, widen
from dsjob.errors import CorruptCheckpointError, UsageError

if TYPE_CHECKING:
    from torch import nn

_ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Pretrained:
    """What is asked for beside the weights: a tokenizer's files out of a folder, by default those of the tokenizer that
    the job names, where they are on this machine (which is logged); the adapter `adapter` of several, or `merge`d into
    the base model; `adapter_config`: its configuration as a file, where the checkpoint has none."""

    tokenizer: str | None = None
    merge: bool = False
    adapter: str | None = None
    adapter_config: str | None = None


@dataclass
class PlannedFolder:
    """What is written: tensors by their names in the checkpoint, to their names there; `weights`: the one file of
    weights, where that has a name of its own; other files by name; and what to tell."""

    names: dict[str, str]
    cast: Rounded
    beside: dict[str, bytes]
    weights: str = ""
    notes: list[str] = field(default_factory=list)


def plan_folder(wanted: Pretrained, place: plain.Folder, checkpoint: plain.Checkpoint, to: str) -> PlannedFolder:
    """The folder for a checkpoint's model. Raises UsageError for what from_pretrained would not load as it was."""
    kept = checkpoint.manifest.get("pretrained")
    found = plain.weights(checkpoint)
    shapes = {name: checkpoint.tensors[source].shape for name, source in found.items()}
    adapter = find_adapter(kept, shapes, wanted.adapter_config, wanted.adapter)
    if adapter is None and wanted.merge:
        raise UsageError("--merge: the checkpoint's model has no adapter", hint="leave --merge out")
    if isinstance(kept, dict) and any("config.json" in part for part in kept.values() if isinstance(part, dict)):
        make_files(kept, to)  # which tells to choose one of several models
    base, note = _build(kept)
    notes = [note] if note else []
    if adapter is not None and not wanted.merge:
        others = [other for other in list_adapters(kept) if other.name != adapter.name]
        return _plan_adapter(adapter, others, base, shapes, to, notes)
    beside = make_files(kept, to)
    if adapter is None:
        if base is not None:
            _require(base, shapes)
        return PlannedFolder({name: name for name in shapes}, Rounded(DTYPES[to]), beside, notes=notes)
    names = name_merged(adapter, shapes)

    def is_transposed(module: str) -> bool | None:
        from dsjob.checkpoint import architecture

        return architecture.is_transposed(base, module) if base is not None else None

    updates = find_updates(adapter, shapes, _make_reader(place, checkpoint, found), is_transposed)
    by_place = {found[name]: update for name, update in updates.items()}  # tied weights change together
    merged = {names[name]: by_place[source] for name, source in found.items() if name in names and source in by_place}
    if base is not None:
        _require(base, {new: shapes[name] for name, new in names.items()})
    return PlannedFolder(names, Merged(DTYPES[to], merged), beside, notes=notes)


def _plan_adapter(
    adapter: Adapter, others: Sequence[Adapter], base: nn.Module | None, shapes: Shapes, to: str, notes: list[str]
) -> PlannedFolder:
    names: dict[str, str] | None = None
    if base is not None:
        from dsjob.checkpoint.architecture import CannotBuildError, name_adapter

        try:
            names = name_adapter(base, adapter, others, shapes)
        except CannotBuildError as error:
            notes = [f"the adapter's names are not compared with what peft expects: {error}"]
    if names is None:
        names = name_lora(adapter, shapes)
    files = {"adapter_config.json": adapter.to_json()}
    return PlannedFolder(names, Rounded(DTYPES[to]), files, _ADAPTER_FILE, notes)


def _build(kept: object) -> tuple[nn.Module | None, str]:
    """The architecture on the meta device; or None, and why there is none."""
    config = kept.get("config.json") if isinstance(kept, dict) else None
    if not isinstance(config, dict):
        return None, ""  # which make_files complains of, where it matters
    from dsjob.checkpoint.architecture import CannotBuildError, build_skeleton

    try:
        return build_skeleton(config), ""
    except CannotBuildError as error:
        return None, f"the names of the weights are not compared with the architecture's: {error}"


def _require(base: nn.Module, shapes: Shapes) -> None:
    from dsjob.checkpoint.architecture import require_names

    require_names(base, shapes)


def _make_reader(place: plain.Folder, checkpoint: plain.Checkpoint, found: Mapping[str, str]) -> Callable[[str], Array]:
    """Reads one tensor whole, verified, as float32."""

    def read(name: str) -> Array:
        shards, entry = plain.Shards(place, checkpoint), checkpoint.tensors[found[name]]
        try:
            data = memoryview(b"".join(bytes(block) for block in shards.stream(found[name])))
        finally:
            shards.close()
        if entry.dtype not in ("F64", *DTYPES.values()):
            raise CorruptCheckpointError(f"{name} has the dtype {entry.dtype}, which no adapter has")
        values: Any = np.frombuffer(data, "<f8") if entry.dtype == "F64" else widen(entry.dtype, data)
        return np.asarray(values, "<f4").reshape(entry.shape)

    return read
