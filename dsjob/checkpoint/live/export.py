"""Writes the weights of a live engine to one file, for other programs."""

from __future__ import annotations

import io

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from dsjob import storage
from dsjob.checkpoint.live.state import TrainingState


def save_model(url: str, state: TrainingState, *, dtype: torch.dtype, writes: bool) -> None:
    """Gathers all weights, and writes them to one file on the rank where `writes` is true. A collective.

    The format is safetensors if `url` ends in `.safetensors`, otherwise that of torch.save. Floating-point weights are
    converted to `dtype`.
    """
    gathered: dict[str, Tensor] = {}
    # One tensor at a time, so that a rank's device holds at most one whole tensor beside its shards.
    for name in [*state.weights, *state.buffers]:
        full = state.gather(name)
        if writes:
            gathered[name] = full.to(dtype if full.is_floating_point() else full.dtype).cpu().contiguous()
    if not writes:
        return
    # The same tensor under both names. torch.save writes it once, and loading ties them again.
    for alias, name in state.aliases.items():
        gathered[alias] = gathered[name]
    folder = url.rpartition("/")[0]
    if folder:
        storage.make_folder(folder)
    if url.endswith(".safetensors"):
        # safetensors refuses tensors that share memory.
        untied = {name: tensor.clone() if name in state.aliases else tensor for name, tensor in gathered.items()}
        storage.write_bytes(url, to_safetensors(untied, metadata={"format": "pt"}))
        return
    buffer = io.BytesIO()
    torch.save(gathered, buffer)
    storage.write_bytes(url, buffer.getvalue())
