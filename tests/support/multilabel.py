"""A model without labels, and Trainers for it as programs of Hugging Face have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dsjob import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(8, 4), SimpleNamespace(num_labels=4)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layer(x))


class Kept(Net):
    """Takes anything, and returns its loss only with labels."""

    def forward(self, x: Tensor, **more: Any) -> SimpleNamespace:
        return super().forward(x)


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return nn.functional.mse_loss(logits, y), logits


def samples(n: int = 16, targets: str | None = "labels") -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(n)
    pairs = [(torch.randn(8, generator=random), torch.randint(2, (4,), generator=random)) for _ in range(n)]
    return [{"x": x, **({targets: y} if targets else {})} for x, y in pairs]


def pairs(n: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [(each["x"], each["labels"].float()) for each in samples(n)]


class MultilabelTrainer(Trainer):
    """That of the documentation of transformers, word for word."""

    def compute_loss(self, model, inputs, return_outputs=False):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        loss_fct = torch.nn.BCEWithLogitsLoss()
        loss = loss_fct(
            logits.view(-1, self.model.config.num_labels), labels.float().view(-1, self.model.config.num_labels)
        )
        return (loss, outputs) if return_outputs else loss


class Tags(Trainer):
    """Its targets have another name, and it asks for them in another way."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        tags = inputs.pop("tags", None)
        outputs = model(**inputs)
        loss = nn.functional.binary_cross_entropy_with_logits(outputs.logits, tags.float())
        return (loss, outputs) if return_outputs else loss


class _Rounding(Trainer):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool = False) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs)
        return loss, logits.round(), labels


class RoundingMultilabel(_Rounding, MultilabelTrainer):
    pass


class RoundingTags(_Rounding, Tags):
    pass


class Rounding(_Rounding):
    pass
