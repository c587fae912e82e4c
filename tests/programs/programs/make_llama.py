"""Writes a tiny pretrained Llama with its tokenizer: the folder llama."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "then"]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    # The weights are numbers of bf16: dsjob's masters begin as the weights in fp32, DeepSpeed's as those in bf16.
    LlamaForCausalLM(config).bfloat16().float().save_pretrained("llama")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("llama")


if __name__ == "__main__":
    main()
