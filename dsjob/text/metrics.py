"""Metrics of generated texts that work without a network. Each takes two lists: `preds`, and `target`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dsjob.errors import ContractError, how_to_install

_KEYS = ("rouge1", "rouge2", "rougeL")


class Rouge(nn.Module):
    """ROUGE of torchmetrics: `rouge1_fmeasure`, `rougeL_recall`, ... of each of `keys`.

    Raises ContractError for rougeLsum, which splits sentences with data that torchmetrics would download.
    """

    higher_is_better = True

    def __init__(self, keys: Sequence[str] = _KEYS) -> None:
        super().__init__()
        if "rougeLsum" in keys:
            raise ContractError("rougeLsum needs a download", hint=f"keys: [{', '.join(_KEYS)}]")
        try:
            from torchmetrics.text import ROUGEScore
        except ImportError as error:
            hint = how_to_install("torchmetrics")
            raise ContractError("ROUGE needs the package torchmetrics", hint=hint) from error
        try:
            self.score: Any = ROUGEScore(rouge_keys=tuple(keys))
        except ValueError as error:
            raise ContractError(f"keys: {error}") from error

    def update(self, preds: Sequence[str], target: Sequence[str]) -> None:
        """Adds a batch."""
        self.score.update(list(preds), list(target))

    def compute(self) -> Any:
        """The scores by name, fp32 []."""
        return self.score.compute()

    def reset(self) -> None:
        """Begins anew."""
        self.score.reset()


def exact_match(preds: Sequence[str], target: Sequence[str]) -> float:
    """The share of texts that equal their references, apart from space at both ends."""
    same = [found.strip() == wanted.strip() for found, wanted in zip(preds, target, strict=True)]
    return sum(same) / len(same)


exact_match.higher_is_better = True  # type: ignore[attr-defined]
