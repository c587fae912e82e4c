"""Batches of texts of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsjob.data.batches import IGNORED

_FILL = {"labels": IGNORED, "position_ids": 0}


class Pad:
    """Pads samples to the longest of a batch: int64 [samples, tokens] each, and an `attention_mask` beside `input_ids`.

    Args:
        pad_id: the id that fills up `input_ids`. Nothing attends to it, so any will do.
        multiple_of: pads to a multiple of it, for fast kernels and fewer shapes.
        use_cache: what the batch says of it if the samples are packed windows; None for models without that argument.
    """

    def __init__(self, pad_id: int = 0, multiple_of: int = 1, use_cache: bool | None = False) -> None:
        self._pad_id, self._multiple, self._use_cache = pad_id, multiple_of, use_cache

    def __call__(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        size = -(-longest // self._multiple) * self._multiple
        batch: dict[str, Any] = {
            name: torch.stack([_fill(sample[name], size, _FILL.get(name, self._pad_id)) for sample in samples])
            for name in samples[0]
        }
        # With a mask or a cache, models of transformers would not look for texts in position_ids, and attend to all.
        if "position_ids" not in batch:
            masks = [_fill(torch.ones_like(sample["input_ids"]), size, 0) for sample in samples]
            batch["attention_mask"] = torch.stack(masks)
        elif self._use_cache is not None:
            batch["use_cache"] = self._use_cache
        return batch


def _fill(values: Tensor, size: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)), value=value)
