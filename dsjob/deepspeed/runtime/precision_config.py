"""`deepspeed.runtime.precision_config`: the half-precision sections of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.config import Section


class DeepSpeedFP16Config(Section):
    """`fp16`."""

    path = ("fp16",)


class DeepSpeedBF16Config(Section):
    """`bf16`."""

    path = ("bf16",)


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The fp16 section of a config."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The bf16 section of a config, also under its older name `bfloat16`."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


__getattr__ = _explain_names(__name__)
