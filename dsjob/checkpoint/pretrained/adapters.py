"""Adapters of peft in a checkpoint: their configuration, the names of their tensors, and merging them into weights.

Imports no torch and no peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from dsjob import storage
from dsjob.checkpoint.format.rounding import Rounded, widen
from dsjob.checkpoint.pretrained.adapter_config import describe_origin
from dsjob.contract.shown import cut
from dsjob.errors import UsageError

Array = npt.NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]

PREFIX = "base_model.model."  # the prefix of all names in a PeftModel
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_[AB]|[A-Za-z_]+)\.(?P<adapter>[^.]+)(?:\.weight)?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
# Keys of a LoraConfig that do not change what the product B @ A adds, or that merging reads (see _find_scale).
_WITHOUT_EFFECT = {
    *(
        "peft_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "peft_version",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
    *("lora_dropout", "init_lora_weights", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *(
        "fan_in_fan_out",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "runtime_config",
    ),
    *("qalora_group_size", "ensure_weight_tying"),
}


def describe_adapters(model: object) -> dict[str, dict[str, Any]]:
    """The configurations of a model's adapters by name, as JSON values. Empty if the model is not one of peft's."""
    found = {}
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        try:
            values = json.loads(json.dumps(config.to_dict(), default=_plain))
            if values.get("task_type") is None:  # then peft uses auto_mapping to find the class of the base model
                kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
                values["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
            found[str(name)] = values
        except (AttributeError, TypeError, ValueError):  # not a peft config; another library uses the same attribute
            continue
    return {name: values for name, values in found.items() if isinstance(values, dict) and values.get("peft_type")}


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return None  # an object that exists only during the run


def has_adapters(names: Collection[str]) -> bool:
    """Whether a model with these tensor names has adapters."""
    return any(name.startswith(PREFIX) or ".lora_" in name or ".base_layer." in name for name in names)


@dataclass(frozen=True)
class Adapter:
    """One adapter: its name, and the content of adapter_config.json."""

    name: str
    config: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """peft's name of the method: LORA, IA3, ..."""
        return str(self.config.get("peft_type"))

    def to_json(self) -> bytes:
        """adapter_config.json, as peft's `save_pretrained` writes it."""
        values = {**self.config, "inference_mode": True, "auto_mapping": describe_origin(self.config)}
        return f"{json.dumps(values, indent=2, sort_keys=True)}\n".encode()


def list_adapters(kept: object) -> list[Adapter]:
    """The adapters whose configuration is in the checkpoint. kept: the result of `describe_pretrained`."""
    found = kept.get("adapters") if isinstance(kept, dict) else None
    named = found.items() if isinstance(found, dict) else ()
    return [Adapter(name, config) for name, config in named if isinstance(config, dict)]


def find_adapter(kept: object, names: Collection[str], file: str | None, wanted: str | None) -> Adapter | None:
    """The adapter in a checkpoint with these tensor names; None if the model has none.

    kept: the result of `describe_pretrained`. file: an adapter_config.json, if the checkpoint has none. wanted: the
    adapter's name, if there are several. Raises UsageError, StorageError.
    """
    configs = {adapter.name: adapter.config for adapter in list_adapters(kept)}
    if not has_adapters(names):
        if file or wanted:
            raise UsageError("the checkpoint's model has no adapter", hint="omit --adapter-config and --adapter")
        return None
    there = sorted({match["adapter"] for name in names if (match := _LORA.fullmatch(name) or _SAVED.fullmatch(name))})
    there = sorted(configs) or there or ["default"]
    if wanted is None and len(there) > 1:
        raise UsageError(
            f"the model has several adapters: {cut(', '.join(there), 300)}", hint=f"--adapter {cut(there[0])}"
        )
    name = wanted or there[0]
    if name not in there:
        raise UsageError(f"the model has no adapter {name!r}", hint=f"available: {cut(', '.join(there), 300)}")
    config = _read_config(file) if file else configs.get(name)
    if config is None:
        raise UsageError(
            "the model has peft adapters, but the checkpoint does not contain their configuration",
            hint="add --adapter-config FILE: an adapter_config.json, as written by PeftConfig.save_pretrained",
        )
    return Adapter(name, config)


def _read_config(file: str) -> dict[str, Any]:
    try:
        config = json.loads(storage.read_text(file))
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise UsageError(f"{file} has no peft_type", hint="name the adapter_config.json of this adapter")
    return config


def name_lora(adapter: Adapter, names: Collection[str]) -> dict[str, str]:
    """Maps the model's names of a LoRA adapter's tensors to those that peft saves. Raises UsageError."""
    if adapter.kind != "LORA":
        raise UsageError(
            f"an adapter of type {adapter.kind} can only be written if the base model is one of transformers'",
            hint="--to fp32 writes all tensors, for the job's own model",
        )
    new = {}
    for name in names:
        lora, saved = _LORA.fullmatch(name), _SAVED.fullmatch(name)
        full = name if name.startswith(PREFIX) else PREFIX + name
        if lora and lora["adapter"] == adapter.name:
            new[name] = full.replace(f".{adapter.name}", "", 1) if full.endswith(f".{adapter.name}") else full
            new[name] = new[name].replace(f".{adapter.name}.", ".", 1)
        elif saved and saved["adapter"] == adapter.name:
            new[name] = full.replace(f".modules_to_save.{adapter.name}.", ".", 1)
        elif _is_trained_bias(adapter, name, names):
            new[name] = full.replace(".base_layer.", ".", 1) if adapter.config.get("bias") == "lora_only" else full
    if not new:
        raise UsageError(
            f"the checkpoint has no tensors of the adapter {adapter.name!r}", hint="--to fp32 writes all tensors"
        )
    return new


def _is_trained_bias(adapter: Adapter, name: str, names: Collection[str]) -> bool:
    bias = adapter.config.get("bias", "none")
    module = name.removesuffix(".base_layer.bias")
    lora = module != name and f"{module}.lora_A.{adapter.name}.weight" in names
    return name.endswith(".bias") and (bias == "all" or (bias == "lora_only" and lora))


def name_merged(adapter: Adapter, names: Collection[str]) -> dict[str, str]:
    """Maps names in the model with adapters to those in the base model. Omits the adapters' own tensors."""
    new: dict[str, str] = {}
    replaced = {
        f"{match['module']}.{match['rest']}"
        for name in names
        if (match := _SAVED.fullmatch(name)) and match["adapter"] == adapter.name
    }
    for name in names:
        saved = _SAVED.fullmatch(name)
        if _LORA.fullmatch(name) or (saved and saved["adapter"] != adapter.name):
            continue
        plain = f"{saved['module']}.{saved['rest']}" if saved else name
        plain = plain.replace(".original_module.", ".").replace(".base_layer.", ".")
        if not saved and ".original_module." in name and plain in replaced:
            continue
        new[name] = plain.removeprefix(PREFIX)
    return new


@dataclass(frozen=True)
class Update:
    """A merge's change to a weight: scale * left @ right, where left is [rows, rank] and right is [rank, columns]."""

    left: Array
    right: Array
    scale: float

    def add(self, values: Array, start: int) -> None:
        """Adds the change in place to `values`, the weight's elements from `start` on."""
        columns = self.right.shape[1]
        # Compute only the rows that these elements touch.
        first, last = start // columns, -(-(start + len(values)) // columns)
        rows = (self.left[first:last] @ self.right) * np.float32(self.scale)
        values += rows.reshape(-1)[start - first * columns :][: len(values)]

    @property
    def size(self) -> int:
        """The number of elements of the weight."""
        return int(self.left.shape[0] * self.right.shape[1])


class Merged(Rounded):
    """Like `Rounded`, but first adds updates to the weights, in fp32."""

    def __init__(self, dtype: str, updates: Mapping[str, Update]) -> None:
        super().__init__(dtype)
        self._updates, self._done = updates, dict[str, int]()

    def __call__(self, name: str, dtype: str, block: memoryview) -> memoryview:
        """See Fp32. Relies on the blocks of a tensor arriving in order."""
        update = self._updates.get(name)
        if update is None:
            return super().__call__(name, dtype, block)
        wide = np.frombuffer(block, "<f8") if dtype == "F64" else widen(dtype, block)
        values = wide.astype("<f4")
        start = self._done.get(name, 0)
        update.add(values, start)
        self._done[name] = (start + len(values)) % update.size
        return super().__call__(name, "F32", values.view(np.uint8).data)


def find_updates(
    adapter: Adapter,
    shapes: Shapes,
    read: Callable[[str], Array],
    transposed: Mapping[str, bool],
    alphas: Mapping[str, float],
) -> dict[str, Update]:
    """The updates of a LoRA adapter, by the names of the weights in the model with adapters.

    shapes: of all tensors. read: returns one of them as float32. transposed: whether a module (by its name in the base
    model) stores its weight as [in, out], if known. alphas: see `find_alphas`. Raises UsageError if it cannot merge the
    adapter exactly.
    """
    require_mergeable(adapter)
    updates = {}
    for name in shapes:
        match = _LORA.fullmatch(name)
        if match is None or match["adapter"] != adapter.name or match["kind"] in ("B", "embedding_B"):
            continue
        module, kind = match["module"], match["kind"]
        if kind not in ("A", "embedding_A"):
            raise _cannot_merge(f"{name} is neither lora_A nor lora_B")
        weight = f"{module}.base_layer.weight"
        second = re.sub(r"\.lora_(embedding_)?A\.", lambda found: f".lora_{found[1] or ''}B.", name)
        if weight not in shapes or second not in shapes:
            raise _cannot_merge(f"{name} lacks its counterpart {weight if weight not in shapes else second}")
        if not _is_pair(shapes[name], shapes[second]):
            raise _cannot_merge(f"the shapes of {name} and {second} do not match")
        down, up = read(name), read(second)
        rank = down.shape[0]
        left, right = up.reshape(-1, rank), down.reshape(rank, -1)
        shape = shapes[weight]
        base = module.removeprefix(PREFIX)
        known = True if kind == "embedding_A" else transposed.get(base)
        swapped = _is_swapped(adapter, shape, left, right) if known is None else known
        rows = right.shape[1] if swapped else left.shape[0]
        if shape[:1] != (rows,) or math.prod(shape) != left.shape[0] * right.shape[1]:
            raise _cannot_merge(f"{name} does not match {weight} of shape {list(shape)}")
        if swapped:
            left, right = np.ascontiguousarray(right.T), np.ascontiguousarray(left.T)
        updates[weight] = Update(left, right, _find_scale(adapter, alphas.get(base), rank))
    if not updates:
        raise UsageError(
            f"the checkpoint has no tensors of the adapter {adapter.name!r}", hint="--to fp32 writes all tensors"
        )
    return updates


def _is_pair(down: tuple[int, ...], up: tuple[int, ...]) -> bool:
    """Whether the product B @ A exists for these shapes of A and B. The rank is the first dim of A, and divides B's
    size."""
    return len(down) > 1 and len(up) > 1 and 0 not in (*down, *up) and math.prod(up) % down[0] == 0


def _is_swapped(adapter: Adapter, shape: tuple[int, ...], left: Array, right: Array) -> bool:
    if left.shape[0] != right.shape[1]:
        return shape == (right.shape[1], left.shape[0])
    return bool(adapter.config.get("fan_in_fan_out"))


def require_mergeable(adapter: Adapter) -> None:
    """Raises UsageError unless the adapter is plain LoRA, which adds only a product to each weight."""
    if adapter.kind != "LORA":
        raise _cannot_merge(f"the adapter is of type {adapter.kind}")
    more = sorted(key for key, value in adapter.config.items() if value and key not in _WITHOUT_EFFECT)
    if more:
        raise _cannot_merge(f"the adapter's configuration uses {', '.join(more)}")


def _cannot_merge(why: str) -> UsageError:
    return UsageError(
        f"cannot merge: {why}",
        hint="convert without --merge, then PeftModel.from_pretrained(base, FOLDER).merge_and_unload() with peft",
    )


def list_modules(adapter: Adapter, names: Collection[str]) -> list[str]:
    """The modules that a LoRA adapter changes, by their names in the base model."""
    found = (match for name in names if (match := _LORA.fullmatch(name)) and match["adapter"] == adapter.name)
    return sorted({match["module"].removeprefix(PREFIX) for match in found})


def find_alphas(adapter: Adapter, modules: Collection[str]) -> dict[str, float]:
    """The alphas of modules that match a pattern in `alpha_pattern`. Call this only in the process of `apart`, because
    the patterns come from a checkpoint and may take long to match."""
    patterns = adapter.config.get("alpha_pattern") or {}
    compiled = [(re.compile(rf"(.*\.)?({pattern})"), float(value)) for pattern, value in patterns.items()]
    found = {}
    for module in modules:
        alpha = next((value for pattern, value in compiled if pattern.fullmatch(module)), None)
        if alpha is not None:
            found[module] = alpha
    return found


def _find_scale(adapter: Adapter, alpha: float | None, rank: int) -> float:
    """peft's scale of a module: alpha / r, or alpha / sqrt(r) with rslora."""
    config = adapter.config
    given = config.get("lora_alpha")
    alpha = float(8 if given is None else given) if alpha is None else alpha
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
