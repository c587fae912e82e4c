"""Moves batches to the device, and counts their samples, tokens and targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label of positions that are not targets, in torch's cross entropy and in transformers


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors (in mappings, lists, tuples, dataclasses) on `device`. The host does not wait for
    the copies."""
    if isinstance(batch, Tensor):
        # This overlaps with computation only if the batch is in pinned memory (`data.pin_memory`).
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(item, device) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {field.name: to_device(getattr(batch, field.name), device) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **moved)
    return batch


def count_samples(batch: Any) -> int:
    """The size of the first dimension of the first tensor in `batch`; 1 if there is none."""
    first = _first_tensor(batch)
    return first.shape[0] if first is not None and first.dim() else 1


def count_elements(batch: Any) -> int:
    """The number of elements of the first tensor in `batch`: the tokens, if the batch has token ids."""
    first = _first_tensor(batch)
    return first.numel() if first is not None else 0


def count_targets(batch: Any, *, shifted: bool = False) -> Tensor | int | None:
    """The number of targets in a batch: its `labels` (or `shift_labels`) that are not -100. None if it has no labels.

    shifted: the model shifts labels by one, so the first label of each sequence is not a target. Labels that are not
    integers count as one target per sample. If the labels are on a GPU, the count stays there, as an int64 tensor of
    shape [], so that the host does not wait.
    """
    if not isinstance(batch, Mapping):
        return None
    ready = isinstance(batch.get("shift_labels"), Tensor)
    labels = batch.get("shift_labels" if ready else "labels")
    if not isinstance(labels, Tensor) or not labels.dim():
        return None
    if labels.is_floating_point():
        return labels.shape[0]
    if shifted and not ready and labels.dim() > 1:
        labels = labels[..., 1:]
    count = torch.count_nonzero(labels != IGNORED)
    return int(count) if count.device.type == "cpu" else count


def is_tokens(batch: Any) -> bool:
    """Whether the first tensor in `batch` looks like token ids: integers of shape [samples, tokens]."""
    first = _first_tensor(batch)
    return first is not None and first.dim() == 2 and not first.is_floating_point()


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        items: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        items = batch
    else:
        return None
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
