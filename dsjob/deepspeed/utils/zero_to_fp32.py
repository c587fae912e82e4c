"""`deepspeed.utils.zero_to_fp32`: the weights in a checkpoint of dsjob, by the calls of DeepSpeed's script."""

from __future__ import annotations

import os

from torch import Tensor, nn

from dsjob.checkpoint.convert import convert, parse_size
from dsjob.checkpoint.weights import read_weights
from dsjob.errors import UsageError

Place = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Place,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """All weights of a checkpoint as fp32, whole, in memory; tied ones are one tensor. Raises UsageError."""
    _refuse_exclusion(exclude_frozen_parameters)
    return read_weights(os.fspath(checkpoint_dir), tag=tag)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Place, tag: str | None = None) -> nn.Module:
    """Loads the weights of a checkpoint into a model on the CPU that has no engine."""
    model.cpu().load_state_dict(read_weights(os.fspath(checkpoint_dir), tag=tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Place,
    output_dir: Place,
    max_shard_size: str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights of a checkpoint as safetensors files, in bounded memory; nothing is ever pickled.

    Raises UsageError.
    """
    _refuse_exclusion(exclude_frozen_parameters)
    convert(
        os.fspath(checkpoint_dir), os.fspath(output_dir), to="fp32", tag=tag, max_shard_size=parse_size(max_shard_size)
    )


def _refuse_exclusion(exclude_frozen_parameters: bool) -> None:
    if exclude_frozen_parameters:
        raise UsageError(
            "a checkpoint does not say which of its parameters were frozen",
            hint="save it without them: engine.save_checkpoint(..., exclude_frozen_parameters=True)",
        )
