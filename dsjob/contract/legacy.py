"""Old spellings that correspond to several current keys, or to keys in another section.

Mere renames are the schemas' `x-aliases`. `check` reports everything that is expanded here as `deprecated`.

Apex's amp: O0 is fp32, O1 is torch_autocast in float16, and O2 and O3 are fp16. dsjob keeps fp32 masters at O3 too,
because pure fp16 weights would round away small optimizer updates.
"""

from __future__ import annotations

from typing import Any

from dsjob.contract.paths import Path

_OFFLOAD = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}


def expand(document: dict[str, Any]) -> dict[str, Any]:
    """`document` (a job, or a DeepSpeed config) with current keys instead of old ones. Current keys take precedence."""
    document = dict(document)
    if isinstance(flags := document.pop("sharded_ddp", None), str):
        document["zero_optimization"] = _merge(_read_sharded_ddp(flags), document.get("zero_optimization", {}))
    if isinstance(section := document.pop("bfloat16", None), dict):
        document["bf16"] = _merge(section, document.get("bf16", {}))
    zero = document.get("zero_optimization")
    if isinstance(zero, bool):
        document["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, dict):
        document["zero_optimization"] = _expand_offload(zero)
    data = document.get("data")
    if isinstance(data, dict) and "label_names" in data:
        document["data"] = {key: value for key, value in data.items() if key != "label_names"}
        document.setdefault("targets", data["label_names"])
    return document


def find_spelling(path: Path, document: dict[str, Any]) -> Path:
    """The place in `document` that the expanded form's `path` comes from: `path` itself, or an old spelling."""
    if path[:1] == ("bf16",) and "bfloat16" in document and "bf16" not in document:
        return ("bfloat16", *path[1:])
    if path[:1] == ("targets",) and "targets" not in document and "label_names" in document.get("data", {}):
        return ("data", "label_names", *path[1:])
    if path[:1] != ("zero_optimization",):
        return path
    zero = document.get("zero_optimization", {})
    section = str(path[1]) if len(path) > 1 else ""
    if isinstance(zero, dict) and section not in zero:
        names = ("cpu_offload_use_pin_memory",) if path[2:] == ("pin_memory",) else _OFFLOAD.get(section, ())
        for name in names:
            if name in zero:
                return ("zero_optimization", name)
        if "sharded_ddp" in document:
            return ("sharded_ddp",)
    return path


def map_amp(document: dict[str, Any]) -> dict[str, Any]:
    """`document` (a job, or a DeepSpeed config) with Apex's `amp` replaced by PyTorch's equivalent; for checked
    documents.

    O1, Apex's default, lowers the precision of operators: torch_autocast. O2 casts the model and keeps fp32 masters:
    fp16. O3 has no masters in Apex; here it becomes fp16 as well (see above). DeepSpeed's dynamic loss scale replaces
    Apex's.
    """
    amp = document.get("amp")
    if not (isinstance(amp, dict) and amp.get("enabled") is True):
        return document
    document = {key: value for key, value in document.items() if key != "amp"}
    level = amp.get("opt_level", "O1")
    if level == "O0":
        return document
    fp16 = dict(document.get("fp16", {}))
    if "loss_scale" in amp:
        fp16.setdefault("loss_scale", 0 if amp["loss_scale"] == "dynamic" else amp["loss_scale"])
    if "min_loss_scale" in amp:
        fp16.setdefault("min_loss_scale", amp["min_loss_scale"])
    if level in ("O2", "O3"):
        return {**document, "fp16": {**fp16, "enabled": True}}
    return {**document, "fp16": fp16, "torch_autocast": {"enabled": True, "dtype": "float16"}}


def _expand_offload(zero: dict[str, Any]) -> dict[str, Any]:
    """Replaces the old flags: one each to offload the optimizer and the parameters, and one for pinned memory."""
    zero = dict(zero)
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for section, names in _OFFLOAD.items():
        for name in names:
            if zero.pop(name, None) is True:
                memory = {"pin_memory": pinned} if isinstance(pinned, bool) else {}
                zero[section] = _merge({"device": "cpu", **memory}, zero.get(section, {}))
    return zero


def _read_sharded_ddp(flags: str) -> dict[str, Any]:
    """The ZeRO section for HF Trainer's FairScale flags: `simple`, `zero_dp_2` or `zero_dp_3`, with `auto_wrap` and
    `offload`."""
    words = flags.split()
    stage = 3 if "zero_dp_3" in words else 2 if "zero_dp_2" in words else 1
    offloaded = {"device": "cpu"} if {"offload", "cpu_offload"} & set(words) else None
    if offloaded is None:
        return {"stage": stage}
    return {"stage": stage, "offload_param" if stage == 3 else "offload_optimizer": offloaded}


def _merge(old: dict[str, Any], new: Any) -> dict[str, Any]:
    return {**old, **new} if isinstance(new, dict) else old
