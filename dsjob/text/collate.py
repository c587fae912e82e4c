"""Batches of texts of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsjob.data.batches import IGNORED


class Pad:
    """Pads samples to the longest of a batch: int64 [samples, tokens] for each key, and an `attention_mask` beside
    `input_ids`. The samples are dicts of tensors or lists, and their labels may have a length of their own.

    Args:
        pad_id: the id that fills up `input_ids`. Nothing attends to it, so any will do.
        multiple_of: pads to a multiple of it, for fast kernels and fewer shapes.
        use_cache: what the batch says of it if the samples are packed windows; None for models without that argument.
    """

    def __init__(self, pad_id: int = 0, multiple_of: int = 1, use_cache: bool | None = False) -> None:
        self._pad_id, self._multiple, self._use_cache = pad_id, multiple_of, use_cache

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {
            name: self._join(name, [torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]
        }
        # With a mask or a cache, models of transformers would not look for texts in position_ids, and attend to all.
        if "position_ids" not in batch:
            if "attention_mask" not in batch:
                ones = [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in samples]
                batch["attention_mask"] = self._join("attention_mask", ones)
        elif self._use_cache is not None:
            batch["use_cache"] = self._use_cache
        return batch

    def _join(self, name: str, values: Sequence[Tensor]) -> Tensor:
        if values[0].dim() == 0:  # such as the class of a text
            return torch.stack(list(values))
        fill = IGNORED if name == "labels" else self._pad_id if name.endswith("input_ids") else 0
        size = -(-max(map(len, values)) // self._multiple) * self._multiple
        return torch.stack([torch.nn.functional.pad(each, (0, size - len(each)), value=fill) for each in values])
