"""A small BERT of DeepSpeed's transformer layers, and its pretraining task: masked language modelling.

Works on bytes of text that every machine has (`recipes/text.py`). Follows Devlin et al. 2019, section 3.1, without the
prediction of the next sentence.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from dsjob.errors import DataError
from dsjob.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from dsjob.recipes.text import ByteText

MASK, BYTE_VOCAB = 256, 264  # ids of bytes are their values; the rest fills the vocabulary up to a multiple of 8
IGNORED = -100  # the label that the loss ignores
MASKED_SHARE = 0.15
BERT_STD, BERT_WIDTH = 0.02, 768


class Bert(nn.Module):
    """Token and learned position embeddings, `layers` layers, and a head that is tied to the token embedding."""

    def __init__(self, vocab_size: int, context: int, layers: int, config: DeepSpeedTransformerConfig) -> None:
        super().__init__()
        width, self.dropout = config.hidden_size, config.hidden_dropout_ratio
        self.std = config.initializer_range
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.embedding_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(DeepSpeedTransformerLayer(config) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.pre_layer_norm else None
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialises every parameter, in place."""
        for module in self.modules():
            if isinstance(module, DeepSpeedTransformerLayer):
                module.init_transformer_weights(module.config.adjust_init_range)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, std=self.std)
        nn.init.zeros_(self.transform.bias)
        nn.init.zeros_(self.bias)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Predicts the token at each position.

        Args:
            input_ids: int64 [B, T], T at most the number of positions.
            labels: int64 [B, T], -100 where nothing is to be predicted, or None.
            attention_mask: [B, T], 0 or False where `input_ids` is padding, or None.

        Returns:
            `logits`, [B, T, V]; and with labels `loss`, a scalar: their mean cross entropy in fp32, in nats.

        Raises:
            ValueError: T is larger than the number of positions.
        """
        length = input_ids.size(1)
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"inputs are {length} tokens long; this model has positions for {self.positions.num_embeddings}"
            )
        x = self.tokens(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        x = F.dropout(self.embedding_norm(x), self.dropout, self.training)
        mask = None if attention_mask is None else attention_mask.bool()
        for layer in self.layers:
            x = layer(x, mask)
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.transform_norm(F.gelu(self.transform(x), approximate="tanh"))
        logits = F.linear(x, self.tokens.weight) + self.bias  # linear with a bias returns a view: FSDP2 warns of it
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


def build(
    vocab_size: int = BYTE_VOCAB,
    context: int = 128,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    pre_layer_norm: bool = False,
    adjust_init_range: bool = True,
    normalize_invertible: bool = False,
    gelu_checkpoint: bool = False,
    attn_dropout_checkpoint: bool = False,
) -> Bert:
    """A BERT with about 12 * layers * width^2 parameters, in fp32. The default is byte-level, with 0.86 million.

    From `pre_layer_norm` on, the arguments are options of `DeepSpeedTransformerConfig`. New weights have BERT's
    deviation, 0.02 at width 768, times sqrt(768 / width).

    Raises:
        ValueError: a size below 1, a `width` that is not a multiple of `heads`, or a dropout outside [0, 1).
    """
    sizes = {"vocab_size": vocab_size, "context": context, "layers": layers, "width": width, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    for name, ratio in (("dropout", dropout), ("attention_dropout", attention_dropout)):
        if not 0.0 <= ratio < 1.0:
            raise ValueError(f"{name} is {ratio}; it must be at least 0 and below 1")
    config = DeepSpeedTransformerConfig(
        hidden_size=width,
        heads=heads,
        attn_dropout_ratio=attention_dropout,
        hidden_dropout_ratio=dropout,
        num_hidden_layers=layers,
        initializer_range=BERT_STD * math.sqrt(BERT_WIDTH / width),
        pre_layer_norm=pre_layer_norm,
        adjust_init_range=adjust_init_range,
        normalize_invertible=normalize_invertible,
        gelu_checkpoint=gelu_checkpoint,
        attn_dropout_checkpoint=attn_dropout_checkpoint,
    )
    return Bert(vocab_size, context, layers, config)


class MaskedText(Dataset[dict[str, Tensor]]):
    """Windows of `ByteText` with hidden bytes: `input_ids` and `labels`, int64 [context].

    15% of the bytes are to be predicted: labels have their values, and -100 elsewhere. Of these, 80% are replaced by
    `MASK`, 10% by a random byte, and 10% are left as they are. Item i depends only on `seed` and i.

    Args:
        split: "train", "validation" or "all" of the text's files.
        context: bytes in a window.
        path: a text file or a folder; None for Python's standard library.
        max_samples: at most this many windows.
        seed: chooses the bytes.

    Raises:
        DataError: an unknown split, a missing path, less than one window of text, or a limit below 1.
    """

    def __init__(
        self,
        split: str = "train",
        context: int = 128,
        path: str | None = None,
        max_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        if max_samples is not None and max_samples < 1:
            raise DataError(f"max_samples is {max_samples}; it must be at least 1")
        self.text = ByteText(split, context, path=path)
        self.samples = min(len(self.text), max_samples or len(self.text))
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"window {index} of {self.samples}")
        tokens = self.text[index]["inputs"]
        rng = np.random.default_rng((self.seed, index))
        hidden = rng.random(len(tokens)) < MASKED_SHARE
        hidden[rng.integers(len(tokens))] = True  # else a short window may have no label
        kind = rng.random(len(tokens))
        random = torch.from_numpy(rng.integers(256, size=len(tokens)))
        replaced = torch.where(torch.from_numpy(kind < 0.8), MASK, random)
        return {
            "input_ids": replaced.where(torch.from_numpy(hidden & (kind < 0.9)), tokens),
            "labels": tokens.where(torch.from_numpy(hidden), IGNORED),
        }
