"""Handwritten digits: a small conv net, scikit-learn's 8x8 images, and the metric to judge it by.

Nothing is downloaded: the 1,797 images come with scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from dsjob.errors import DataError, TargetError, how_to_install

SPLITS = ("train", "validation")
TRAIN_SHARE = 0.8
BRIGHTEST = 16.0  # the images' pixels count from 0 to 16


class DigitsNet(nn.Module):
    """Two 3x3 convolutions, each halving the image, and a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.head = nn.Linear(2 * width * 2 * 2, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Classify images.

        Args:
            images: float [B, 1, 8, 8], from 0 to 1.
            labels: int64 [B], or None.

        Returns:
            `logits`, [B, classes]; and with labels `loss`, a scalar: the mean cross entropy in fp32, in nats.
        """
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        logits = self.head(x.flatten(1))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.float(), labels)}


def build(width: int = 16, classes: int = 10) -> DigitsNet:
    """A net with `width` channels in its first layer. Raises ValueError unless both numbers are positive."""
    if width < 1 or classes < 1:
        raise ValueError(f"width is {width} and classes {classes}; both must be at least 1")
    return DigitsNet(width, classes)


class Digits(Dataset[dict[str, Tensor]]):
    """scikit-learn's digits: `images`, float32 [1, 8, 8] from 0 to 1, and `labels`, int64 scalars.

    The first 80% are train, the last 20% validation, mostly by other writers.

    Args:
        split: "train" or "validation".
        max_samples: at most this many of the split.

    Raises:
        DataError: unknown split, or `max_samples` below 1.
        TargetError: scikit-learn is not installed.
    """

    def __init__(self, split: str = "train", max_samples: int | None = None) -> None:
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}", hint=f"allowed: {', '.join(SPLITS)}")
        if max_samples is not None and max_samples < 1:
            raise DataError(f"max_samples is {max_samples}; it must be at least 1")
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise TargetError("digits need scikit-learn", hint=how_to_install("scikit-learn")) from error
        digits = load_digits()
        border = int(len(digits.target) * TRAIN_SHARE)
        part = slice(border) if split == "train" else slice(border, None)
        self.images = torch.from_numpy(digits.images[part]).float().div_(BRIGHTEST).unsqueeze(1)[:max_samples]
        self.labels = torch.from_numpy(digits.target[part]).long()[:max_samples]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


def accuracy(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The share of the batch that the model classifies correctly: a float32 scalar from 0 to 1."""
    return (outputs["logits"].argmax(dim=-1) == batch["labels"]).float().mean()
