"""Reads the weights of a checkpoint into memory, for programs that need a state dict. `convert` writes files."""

from __future__ import annotations

import torch
from torch import Tensor

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.dtypes import DTYPES
from dsjob.checkpoint.root.source import open_root, renamed


def read_weights(url: str, *, tag: str | None = None, trained: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers by name, whole, on the CPU; floating-point ones as fp32. Tied names share one tensor.

    url: a checkpoint folder, as given to `save_checkpoint`. tag: by default the newest. trained: omit frozen
    parameters. Raises NoCheckpointError, CorruptCheckpointError, StorageError.
    """
    root = open_root(url)
    with renamed(f"read {url}"):
        checkpoint = layout.read_checkpoint(root, layout.find_commit(root, tag))
        checkpoint = layout.without_frozen(checkpoint) if trained else checkpoint
        shards = layout.Shards(root, checkpoint)
        names = layout.weights(checkpoint)
        read: dict[str, Tensor] = {}
        try:
            # Tied names have the same place, so each tensor is read once.
            for place in dict.fromkeys(names.values()):
                entry = checkpoint.tensors[place]
                # Verified at the end of each chunk, so nothing damaged is returned.
                data = b"".join(bytes(block) for block in shards.stream(place))
                dtype = DTYPES[entry.dtype]
                tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
                tensor = tensor.reshape(entry.shape)
                read[place] = tensor.float() if tensor.is_floating_point() else tensor
        finally:
            shards.close()
    return {name: read[place] for name, place in names.items()}
