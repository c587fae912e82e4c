"""T5: the model in its published sizes, and its data: span corruption, or the user's own pairs of texts.

Configurations, examples and batches. `text.py` and `pairs.py` read the texts, `tokens.py` turns them into ids, and
`spans.py` chooses the removed spans. Nothing is downloaded unless `pretrained` or `tokenizer` names something on the
hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dsjob.errors import DataError, TargetError
from dsjob.recipes.pairs import Pair, read_pairs
from dsjob.recipes.spans import corrupt_spans, find_length
from dsjob.recipes.text import ByteText
from dsjob.recipes.tokens import (
    BYTE_VOCAB,
    HUB_HINT,
    PAD,
    ByteTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    import_transformers,
)

PUBLISHED_VOCAB = 32128
IGNORED = -100  # the label that the loss ignores
SHORTEST = 3  # one token, one sentinel, the end

# Raffel et al. 2020, sections 3.1.1 and 3.7; `tiny` is ours and trains on any CPU.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0},
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 12},
    "t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "num_layers": 24},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "num_layers": 24},
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24},
}


def build(
    size: str = "tiny",
    pretrained: str | None = None,
    vocab_size: int | None = None,
    revision: str | None = None,
) -> nn.Module:
    """A `transformers.T5ForConditionalGeneration`, in fp32.

    It has no cache of past keys, which only generation needs, and which would break recomputed activations.

    Args:
        size: one of `SIZES`, with new weights. Ignored with `pretrained`.
        pretrained: a name on the hub or a folder, with configuration and weights.
        vocab_size: for new weights; by default 384 for `tiny` (bytes), and 32128 for the published sizes.
        revision: the commit of `pretrained` on the hub, 40 hex digits.

    Raises:
        ValueError: unknown size, or `vocab_size` together with `pretrained`.
        TargetError: transformers is not installed, or `pretrained` cannot be loaded.
    """
    transformers = import_transformers()
    if pretrained is not None:
        if vocab_size is not None:
            raise ValueError("vocab_size is for new weights; pretrained ones bring their own vocabulary")
        try:
            loaded: nn.Module = transformers.T5ForConditionalGeneration.from_pretrained(
                pretrained, revision=revision or "main", dtype=torch.float32, use_cache=False
            )
        except (OSError, ValueError) as error:
            raise TargetError(f"cannot load pretrained={pretrained!r}: {error}", hint=HUB_HINT) from error
        return loaded
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; allowed: {', '.join(SIZES)}")
    if vocab_size is None:
        vocab_size = BYTE_VOCAB if size == "tiny" else PUBLISHED_VOCAB
    config = transformers.T5Config(**SIZES[size], vocab_size=vocab_size, decoder_start_token_id=PAD, use_cache=False)
    built: nn.Module = transformers.T5ForConditionalGeneration(config)
    return built


def build_dataset(
    split: str = "train",
    path: str | None = None,
    max_samples: int | None = None,
    tokenizer: str | None = None,
    max_source: int = 128,
    max_target: int = 64,
    source: str = "source",
    target: str = "target",
    seed: int = 0,
    revision: str | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Examples for T5: `input_ids`, int64 [at most `max_source`], and `labels`, int64 [at most `max_target`].

    Args:
        split: "train", "validation" or "all" of the text's files, or of the pairs.
        path: a `.jsonl` or `.csv` file of pairs; None for span corruption over Python's standard library.
        max_samples: at most this many examples.
        tokenizer: a name on the hub, or a folder; None for bytes.
        max_source: most ids of a source, including the end marker; longer texts are truncated.
        max_target: the same for targets.
        source: the key or column of the source in `path`.
        target: the key or column of the target in `path`.
        seed: chooses the removed spans.
        revision: the commit on the hub, 40 hex digits, to take `tokenizer` from.

    Raises:
        DataError: an invalid file, line, column, split or limit, or no examples.
    """
    for name, limit in (("max_source", max_source), ("max_target", max_target)):
        if limit < SHORTEST:
            raise DataError(f"{name} is {limit}; it must be at least {SHORTEST}")
    if max_samples is not None and max_samples < 1:
        raise DataError(f"max_samples is {max_samples}; it must be at least 1")
    tokens = ByteTokenizer() if tokenizer is None else PretrainedTokenizer(tokenizer, revision)
    if path is None:
        return CorruptedSpans(split, tokens, max_source, max_target, max_samples, seed)
    pairs = read_pairs(path, split=split, source=source, target=target, max_samples=max_samples)
    return EncodedPairs(pairs, tokens, max_source, max_target)


class EncodedPairs(Dataset[dict[str, Tensor]]):
    """Pairs of texts as ids, each truncated to its limit, with an end marker."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, max_source: int, max_target: int) -> None:
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.limits = (max_source, max_target)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, target = (
            self.tokenizer.encode(text.encode(errors="replace"))[: limit - 1]
            for text, limit in zip(self.pairs[index], self.limits, strict=True)
        )
        return _make_item(source, target, self.tokenizer.eos)


class CorruptedSpans(Dataset[dict[str, Tensor]]):
    """Windows of `ByteText` with spans removed: T5's pretraining task. Item i depends only on `seed` and i."""

    def __init__(
        self, split: str, tokenizer: Tokenizer, max_source: int, max_target: int, max_samples: int | None, seed: int
    ) -> None:
        self.length = find_length(max_source, max_target, len(tokenizer.sentinels))
        self.text = ByteText(split, context=self.length * tokenizer.bytes_per_token)
        self.tokenizer = tokenizer
        self.samples = min(len(self.text), max_samples or len(self.text))
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"example {index} of {self.samples}")
        tokens = self.tokenizer.encode(bytes(self.text[index]["inputs"].tolist()))[: self.length]
        source, target = corrupt_spans(tokens, self.tokenizer.sentinels, np.random.default_rng((self.seed, index)))
        return _make_item(source, target, self.tokenizer.eos)


def _make_item(source: list[int], target: list[int], eos: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([*source, eos]), "labels": torch.tensor([*target, eos])}


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads items to the longest of them: int64 `input_ids`, `attention_mask` (both [B, S]) and `labels` ([B, T]).

    Inputs are padded with 0, which the mask hides. Labels are padded with -100, which the loss ignores.
    """
    inputs = [item["input_ids"] for item in items]
    return {
        "input_ids": pad_sequence(inputs, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in inputs], batch_first=True),
        "labels": pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=IGNORED),
    }
