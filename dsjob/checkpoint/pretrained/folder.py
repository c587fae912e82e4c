"""Plans the output of `convert --to hf`: a transformers model, a peft adapter, or a model with its adapter merged.

Names and shapes are compared with the architecture before anything is written. A checkpoint's model configuration is
untrusted: it may not request more than the files of a model that a document names (see `hub`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.format.rounding import DTYPES, Rounded, widen
from dsjob.checkpoint.pretrained.adapter_config import require_known
from dsjob.checkpoint.pretrained.adapters import (
    Adapter,
    Array,
    Merged,
    Shapes,
    find_adapter,
    find_updates,
    list_adapters,
    list_modules,
    name_lora,
    name_merged,
    require_mergeable,
)
from dsjob.checkpoint.pretrained.apart import Answer, Question, ask, list_pairs
from dsjob.checkpoint.pretrained.configuration import make_files
from dsjob.contract.shown import cut, shorten
from dsjob.errors import CorruptCheckpointError, UsageError
from dsjob.trust import model_files
from dsjob.trust.hub import check_files

_ADAPTER_FILE = "adapter_model.safetensors"
_MOST_DEPTH, _MOST_VALUES, _LONGEST_NAME = 50, 1_000_000, 1_000
_ALONE = "--to fp32 writes only the weights"


@dataclass(frozen=True)
class Pretrained:
    """The options of `convert --to hf`.

    tokenizer: a folder with a tokenizer's files; by default, the tokenizer that the job names, if it is on this machine
    (a log message says so). merge: merge the adapter into the base model. adapter: its name, if there are several.
    adapter_config: a file with its configuration, if the checkpoint has none.
    """

    tokenizer: str | None = None
    merge: bool = False
    adapter: str | None = None
    adapter_config: str | None = None


@dataclass
class PlannedFolder:
    """The folder to write. names: maps tensor names in the checkpoint to those in the folder. beside: the other files
    by name. weights: the name of the single file of weights, or "" for the usual names. notes: for the user."""

    names: dict[str, str]
    cast: Rounded
    beside: dict[str, bytes]
    weights: str = ""
    notes: list[str] = field(default_factory=list)


def plan_folder(wanted: Pretrained, place: plain.Folder, checkpoint: plain.Checkpoint, to: str) -> PlannedFolder:
    """Plans the folder for a checkpoint's model. Raises UsageError if from_pretrained would not restore it exactly."""
    kept = checkpoint.manifest.get("pretrained")
    found = plain.weights(checkpoint)
    shapes = {name: checkpoint.tensors[source].shape for name, source in found.items()}
    _require_short(shapes)
    adapter = find_adapter(kept, shapes, wanted.adapter_config, wanted.adapter)
    if adapter is None and wanted.merge:
        raise UsageError("--merge: the checkpoint's model has no adapter", hint="omit --merge")
    if isinstance(kept, dict) and any("config.json" in part for part in kept.values() if isinstance(part, dict)):
        make_files(kept, to)  # raises UsageError: the user must choose one of several models
    adapters = [adapter, *(other for other in list_adapters(kept) if other.name != adapter.name)] if adapter else []
    _require_harmless(kept, adapters)
    config = kept["config.json"] if isinstance(kept, dict) and isinstance(kept.get("config.json"), dict) else None
    if adapter is not None and not wanted.merge:
        question = Question(config or {}, shapes, list_pairs(adapters))
        return _plan_adapter(adapter, ask(question) if config else None, shapes, to)
    beside = make_files(kept, to)
    if adapter is None:
        notes = ask(Question(config or {}, shapes)).notes
        return PlannedFolder({name: name for name in shapes}, Rounded(DTYPES[to]), beside, notes=notes)
    require_mergeable(adapter)
    names = name_merged(adapter, shapes)
    new_shapes = {new: shapes[name] for name, new in names.items()}
    answer = ask(Question(config or {}, new_shapes, list_pairs([adapter]), list_modules(adapter, shapes)))
    _require_own_bytes(checkpoint, {source for name, source in found.items() if name not in names})
    read = _make_reader(place, checkpoint, found)
    updates = find_updates(adapter, shapes, read, answer.transposed, answer.alphas)
    by_place = {found[name]: update for name, update in updates.items()}  # tied weights change together
    merged = {names[name]: by_place[source] for name, source in found.items() if name in names and source in by_place}
    return PlannedFolder(names, Merged(DTYPES[to], merged), beside, notes=answer.notes)


def _plan_adapter(adapter: Adapter, answer: Answer | None, shapes: Shapes, to: str) -> PlannedFolder:
    names = answer.names if answer and answer.names is not None else name_lora(adapter, shapes)
    files = {"adapter_config.json": adapter.to_json()}
    return PlannedFolder(names, Rounded(DTYPES[to]), files, _ADAPTER_FILE, answer.notes if answer else [])


def _require_own_bytes(checkpoint: plain.Checkpoint, sources: Iterable[str]) -> None:
    """Raises CorruptCheckpointError if tensors to be held in memory have more bytes than all shards together."""
    held = sum(chunk.length for source in sources for chunk in checkpoint.tensors[source].chunks)
    if held > sum(checkpoint.files.values()):
        what = f"the adapter's tensors have {held:,} bytes, more than all shards together: tensors share bytes"
        raise CorruptCheckpointError(what, hint=plain.ELSEWHERE)


def _require_short(names: Iterable[str]) -> None:
    for name in names:
        if len(name) > _LONGEST_NAME:
            raise UsageError(f"the checkpoint has a name of {len(name):,} characters: {shorten(name)}", hint=_ALONE)


def _require_harmless(kept: object, adapters: Sequence[Adapter]) -> None:
    """Raises UsageError if a checkpoint's configurations could execute code, or have unknown keys for peft.

    `hub` applies the same policy to the arguments in a document and to the files in a model's folder.
    """
    files = (
        {name: kept.get(name) for name in ("config.json", "generation_config.json")} if isinstance(kept, dict) else {}
    )
    files |= {f"adapter_config.json of {cut(adapter.name)}": adapter.config for adapter in adapters}
    for name, value in files.items():
        _require_shallow(name, value)
        for problem in check_files(model_files.walk(name, value), ()):
            raise UsageError(f"the checkpoint's {cut(problem.message, 200)}", hint=_ALONE)
    for adapter in adapters:
        require_known(adapter.config)


def _require_shallow(name: str, value: Any) -> None:
    """Raises UsageError for a configuration that is nested too deeply for recursive code, or too large to check."""
    level, depth, count = [value], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        if depth > _MOST_DEPTH or count > _MOST_VALUES:
            excess = f"more than {_MOST_DEPTH} levels" if depth > _MOST_DEPTH else f"more than {_MOST_VALUES:,} values"
            raise UsageError(f"the checkpoint's {name} has {excess}", hint=_ALONE)
        level = [
            item
            for above in level
            for item in (above.values() if isinstance(above, dict) else above if isinstance(above, list) else ())
        ]


def _make_reader(place: plain.Folder, checkpoint: plain.Checkpoint, found: Mapping[str, str]) -> Callable[[str], Array]:
    """A function that reads and verifies one whole tensor, as float32."""

    def read(name: str) -> Array:
        shards, entry = plain.Shards(place, checkpoint), checkpoint.tensors[found[name]]
        try:
            data = memoryview(b"".join(bytes(block) for block in shards.stream(found[name])))
        finally:
            shards.close()
        if entry.dtype not in ("F64", *DTYPES.values()):
            raise CorruptCheckpointError(f"{name} has an invalid dtype for an adapter: {entry.dtype}")
        values: Any = np.frombuffer(data, "<f8") if entry.dtype == "F64" else widen(entry.dtype, data)
        return np.asarray(values, "<f4").reshape(entry.shape)

    return read
