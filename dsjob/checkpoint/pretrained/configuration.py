"""The configuration of a transformers model: what a checkpoint stores, and the files that `from_pretrained` loads.

Imports neither torch nor transformers: a model provides its configuration as JSON.
"""

from __future__ import annotations

import json
from typing import Any

from dsjob.checkpoint.pretrained.adapters import describe_adapters
from dsjob.contract.shown import cut
from dsjob.errors import UsageError

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # dtypes as transformers names them


def describe_pretrained(model: object) -> dict[str, Any]:
    """What `convert --to hf` needs to know about a model, as JSON values. Empty for other models.

    Contains `config.json` and `generation_config.json` of a transformers model, and `adapters`: the configurations of
    peft adapters by name.
    """
    found: dict[str, Any] = {}
    adapters = describe_adapters(model)
    if adapters:
        found["adapters"] = adapters
    for attribute in ("config", "generation_config"):
        to_json = getattr(getattr(model, attribute, None), "to_json_string", None)
        if to_json is None:
            continue
        try:
            values = json.loads(to_json(), parse_constant=_refuse)
        except (TypeError, ValueError):  # another library's `config`
            continue
        if isinstance(values, dict) and values:
            found[f"{attribute}.json"] = values
    config = found.get("config.json")
    if config is None:
        return found if adapters else {}
    base = model.get_base_model() if adapters and hasattr(model, "get_base_model") else model
    kind = next((c.__name__ for c in type(base).__mro__ if c.__module__.startswith("transformers.")), None)
    if kind and not config.get("architectures"):
        config["architectures"] = [kind]
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def make_files(kept: object, dtype: str) -> dict[str, bytes]:
    """The model's configuration files for the folder, by name. Raises UsageError.

    kept: the result of describe_pretrained. dtype: of the weights: fp32, bf16 or fp16.
    """
    kept = kept if isinstance(kept, dict) else {}
    if not isinstance(kept.get("config.json"), dict):
        several = [name for name, value in kept.items() if isinstance(value, dict) and "config.json" in value]
        if several:
            raise UsageError(
                "the checkpoint contains several models", hint=f"add --model: {cut(', '.join(several), 300)}"
            )
        hint = "--to fp32 writes only the weights; --to hf works only if the job's model is one of transformers'"
        raise UsageError("the checkpoint has no configuration of a transformers model", hint=hint)
    config = {key: value for key, value in kept["config.json"].items() if key != "torch_dtype"}
    texts = {"config.json": {**config, "dtype": NAMES[dtype]}}
    if isinstance(kept.get("generation_config.json"), dict):
        texts["generation_config.json"] = kept["generation_config.json"]
    return {name: f"{json.dumps(value, indent=2, sort_keys=True)}\n".encode() for name, value in texts.items()}
