"""`deepspeed.utils.zero_to_fp32`: the functions of DeepSpeed's script, for the checkpoints of dsjob."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsjob.checkpoint.live.weights import read_weights
from dsjob.checkpoint.offline.convert import Names, convert, parse_size
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.optim.shards import local, own_part
from dsjob.parallel.parameters import find_owned

Place = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Place,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """All weights of a checkpoint by name: full fp32 tensors in memory. Tied weights share one tensor."""
    return read_weights(os.fspath(checkpoint_dir), tag=tag, trained=exclude_frozen_parameters)


@torch.no_grad()
def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Place, tag: str | None = None) -> nn.Module:
    """Loads the weights of a checkpoint into a model. Moves the model to the CPU, unless it is sharded.

    Only the weights of the model change. An engine around it keeps its old masters and optimizer state, so do not train
    the model with that engine afterwards.
    """
    weights = read_weights(os.fspath(checkpoint_dir), tag=tag)
    if _load_gathered(model, weights):
        return model
    shards = {name: p for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)}
    for name, shard in shards.items():
        if type(shard) is DTensor:
            local(shard).copy_(own_part(weights[name].to(local(shard)), shard))
        else:  # inside zero.GatheredParameters, where it is temporarily a full tensor
            shard.copy_(weights[name])
    others = {name: weight for name, weight in weights.items() if name not in shards}
    (model if shards else model.cpu()).load_state_dict(others, strict=False)
    return model


def _load_gathered(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Loads weights into a model that shows whole copies of its shards, as at stages 1 and 2. Returns whether it does.

    `load_state_dict` would free the copies, which a program may hold.
    """
    shown = dict(model.named_parameters(remove_duplicate=False))
    shards = {name: owned.weight for name, parameter in shown.items() if (owned := find_owned(parameter)) is not None}
    if not shards or any(isinstance(p, DTensor) for p in shown.values()):
        return False
    if not any(isinstance(shard, DTensor) for shard in shards.values()):
        return False
    for name, tensor in [*shown.items(), *model.named_buffers(remove_duplicate=False)]:
        if name in weights:
            tensor.data.copy_(weights[name])
            if isinstance(shard := shards.get(name), DTensor):
                local(shard).copy_(own_part(weights[name].to(local(shard)), shard))
    return True


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Place,
    output_dir: Place,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights of a checkpoint to `pytorch_model.bin`, or to safetensors files, in bounded memory.

    Existing files of the same form are replaced.
    """
    convert(
        os.fspath(checkpoint_dir),
        os.fspath(output_dir),
        to="fp32",
        tag=tag,
        max_shard_size=parse_size(max_shard_size),
        overwrite=True,
        form="safetensors" if safe_serialization else "torch",
        names=Names(trained=exclude_frozen_parameters),
    )


__getattr__ = _explain_names(__name__)
