"""Builds small models in folders with the names that tests would download: transformers prefers a folder to the Hub."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJModel,
    MobileViTConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)


def _make_for_accelerate() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=8, n_layer=2, n_head=2))
    for name in ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2"):
        gpt2.save_pretrained(name)
    bert = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    BertForSequenceClassification(bert).save_pretrained("bert-base-cased")
    MobileViTConfig(hidden_sizes=[16, 24, 32]).save_pretrained("apple/mobilevit-xx-small")
    experts = Qwen2MoeConfig(
        vocab_size=100, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2,
        shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
    )  # fmt: skip
    Qwen2MoeForCausalLM(experts).save_pretrained("peft-internal-testing/tiny-random-qwen-1.5-MoE")


def _make_for_transformers() -> None:
    letters = [f"{mark}{letter}" for mark in ("", "▁") for letter in string.printable if not letter.isspace()]
    pieces = ["<pad>", "</s>", "<unk>", "▁", *letters]
    sizes: dict[str, Any] = {
        "vocab_size": len(pieces),
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    t5 = "patrickvonplaten/t5-tiny-random"
    sizes["decoder_start_token_id"] = 0
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(t5)
    T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0).save_pretrained(t5)
    tokens = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    of_bytes = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    small: dict[str, Any] = {"vocab_size": len(tokens), "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
    gpt2 = "sshleifer/tiny-gpt2"
    GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0)).save_pretrained(gpt2)
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=of_bytes, eos_token="</s>", bos_token="</s>").save_pretrained(gpt2)
    GPTJModel(GPTJConfig(**small, rotary_dim=4)).save_pretrained("hf-internal-testing/tiny-random-gptj")


MAKE: dict[str, Callable[[], None]] = {"accelerate": _make_for_accelerate, "transformers": _make_for_transformers}
