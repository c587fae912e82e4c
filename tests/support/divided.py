"""Small models whose layers ranks divide among them, and training in plain PyTorch to compare with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dsjob.recipes import gpt

VOCABULARY, LENGTH = 47, 12  # an odd vocabulary does not divide evenly
Build = Callable[[], nn.Module]


def build_gpt(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return gpt.build(VOCABULARY, LENGTH, layers=2, width=32, heads=4, dropout=dropout)


def build_gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **rates))


def build_llama(dropout: float = 0.0, *, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "attention_dropout": dropout, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **more))


def build_t5(dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=dropout, **sizes, **tokens))


def build_tied_llama() -> nn.Module:
    return build_llama(tied=True)


MODELS: dict[str, Build] = {
    "gpt": build_gpt,
    "gpt2": build_gpt2,
    "llama": build_llama,
    "tied llama": build_tied_llama,
    "t5": build_t5,
}


def make_batch(step: int, rows: int, *, ours: bool) -> dict[str, Tensor]:
    """int64 [rows, LENGTH] each. ours: for the recipe's model, whose arguments have other names."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))
    inputs, following = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return {"inputs": inputs, "targets": following} if ours else {"input_ids": inputs, "labels": inputs}


@functools.cache
def train_alone(name: str, steps: int, rows: int, clip: float = 1.0) -> dict[str, Any]:
    """Losses, norms of gradients, and final weights of a model, from plain PyTorch on one process.

    With the usual eps of 1e-8, Adam would make the rounding errors of tiny gradients visible: so it does if a batch is
    divided into four.
    """
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-6)
    losses, norms = [], []
    for step in range(steps):
        loss = model(**make_batch(step, rows, ours=name == "gpt"))["loss"]
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


class Sequences(Dataset[dict[str, Tensor]]):
    """Samples for the recipe's model: inputs and targets, int64 [LENGTH]."""

    def __init__(self, length: int = 64) -> None:
        self._batch = make_batch(0, length, ours=True)

    def __len__(self) -> int:
        return len(self._batch["inputs"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self._batch.items()}
