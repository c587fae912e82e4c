"""Models and data of jobs that are divided among pipeline stages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

WORDS = 40
SMALL: dict[str, Any] = {"vocab_size": WORDS, "use_cache": False, "pad_token_id": 0}


def build_gpt2(layers: int = 4, spread: float = 0.02) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=layers, n_head=2, n_positions=16, initializer_range=spread, **off, **SMALL)
    )


def build_llama(layers: int = 4, heads: int = 2, spread: float = 0.02) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LlamaForCausalLM(LlamaConfig(initializer_range=spread, **sizes, **SMALL))


def build_t5(layers: int = 2) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": layers, "num_heads": 2, "dropout_rate": 0}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes, **SMALL))


class Tokens(Dataset[dict[str, Tensor]]):
    """Samples with input_ids, attention_mask and labels, int64 [8]; some are padded. prompt: first tokens without
    labels."""

    def __init__(self, length: int = 64, seed: int = 0, prompt: int = 0) -> None:
        self.prompt = prompt
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, WORDS, (length, 8), generator=generator)
        self.lengths = torch.randint(4, 9, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(8) < self.lengths[index]).long()
        ids = self.ids[index] * mask
        labelled = (mask == 1) & (torch.arange(8) >= self.prompt + index % 2 * bool(self.prompt))
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(labelled, ids, -100)}


def count_kinds(preds: Tensor, target: Tensor) -> float:
    """Of generated tokens."""
    return float(sum(len(set(row)) for row in preds.tolist()) / len(preds))


class TokenStream(IterableDataset[dict[str, Tensor]]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        samples = Tokens()
        while True:
            yield from (samples[number] for number in range(len(samples)))


class Residual(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.drop(torch.relu(self.fc(self.norm(x)))))


def build_layers(width: int = 8, blocks: int = 4, drop: float = 0.0) -> nn.Sequential:
    """A model of layers: float [rows, 6] -> [rows, 3]."""
    return nn.Sequential(nn.Linear(6, width), *(Residual(width, drop) for _ in range(blocks)), nn.Linear(width, 3))


def turn(layer: nn.Linear, x: Tensor) -> Tensor:
    """Goes back through a linear layer."""
    return nn.functional.linear(x, layer.weight.T)


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 6, generator=generator)
        self.y = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Crossing(nn.Module):
    """Has its head in front of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))
        self.last = nn.ModuleList(Residual(8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.last, *self.blocks]:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """Without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)


class Blocks(nn.Module):
    """Blocks in a list, and a head: float [rows, 6] -> [rows, 3]. shares: the head's weight is a part of the first
    layer's. copies: the first values of all blocks are those of the first one."""

    def __init__(self, width: int = 8, blocks: int = 4, *, shares: bool = False, copies: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.last = nn.Linear(width, width if shares else 3)
        self.shares = shares
        for block in self.blocks if copies else ():
            block.load_state_dict(self.blocks[0].state_dict())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x[:, :6] @ self.first.weight[:3].T if self.shares else x


class Doubling(Blocks):
    """Changes its batch in place."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


class Trouble(nn.Module):
    """A layer that ends or stops its rank in a backward or forward pass."""

    def __init__(self, how: str, call: int = 6, *, backward: bool = False) -> None:
        super().__init__()
        self.how, self.call, self.backward, self.calls = how, call, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or x.device.type == "meta":
            return x
        if self.backward:
            x = x * 1.0
            x.register_hook(self.strike)
        else:
            self.strike(x)
        return x

    def strike(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            time.sleep(1)  # ranks post their progress, and with it their stage, every half second
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(0)
            time.sleep(600)
        return x


def build_troubled(place: int, **given: Any) -> nn.Sequential:
    """Six layers, uniformly divided. place: of the one with Trouble."""
    layers = list(build_layers())
    layers[place] = nn.Sequential(layers[place], Trouble(**given))
    return nn.Sequential(*layers)
