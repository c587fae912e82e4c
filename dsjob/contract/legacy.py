"""Spellings of earlier years that stand for several keys of today, or for keys elsewhere.

Other names of one key are the schemas' `x-aliases`. What is expanded here is told as `deprecated` by `check`.

Apex's amp: O0 is fp32, O1 torch_autocast in float16, and O2 and O3 are fp16. O3 keeps fp32 masters all the same:
weights in fp16 alone would lose what optimizer steps add.
"""

from __future__ import annotations

from typing import Any

from dsjob.contract.paths import Path

_OFFLOAD = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}


def expand(document: dict[str, Any]) -> dict[str, Any]:
    """`document` (a job, or a DeepSpeed config) in today's keys; what is given in today's keys already wins."""
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
    return document


def find_spelling(path: Path, document: dict[str, Any]) -> Path:
    """Where `document` gives what its expanded form has at `path`: there, or at an old spelling."""
    if path[:1] == ("bf16",) and "bfloat16" in document and "bf16" not in document:
        return ("bfloat16", *path[1:])
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
    """`document` (a job, or a DeepSpeed config) with Apex's `amp` as what PyTorch has; for checked documents.

    O1, Apex's default, lowers operators: torch_autocast. O2 casts the model and keeps fp32 masters: fp16. O3 has none;
    here it does, since optimizer steps are lost in fp16 weights. Apex's dynamic scale is replaced by DeepSpeed's.
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
    """Offloading was switched on by a flag for each of optimizer and parameters, with one flag for their memory."""
    zero = dict(zero)
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for section, names in _OFFLOAD.items():
        for name in names:
            if zero.pop(name, None) is True:
                memory = {"pin_memory": pinned} if isinstance(pinned, bool) else {}
                zero[section] = _merge({"device": "cpu", **memory}, zero.get(section, {}))
    return zero


def _read_sharded_ddp(flags: str) -> dict[str, Any]:
    """FairScale's flags of HF Trainer: `simple`, `zero_dp_2` or `zero_dp_3`, with `auto_wrap`, `offload`."""
    words = flags.split()
    stage = 3 if "zero_dp_3" in words else 2 if "zero_dp_2" in words else 1
    offloaded = {"device": "cpu"} if {"offload", "cpu_offload"} & set(words) else None
    if offloaded is None:
        return {"stage": stage}
    return {"stage": stage, "offload_param" if stage == 3 else "offload_optimizer": offloaded}


def _merge(old: dict[str, Any], new: Any) -> dict[str, Any]:
    return {**old, **new} if isinstance(new, dict) else old
