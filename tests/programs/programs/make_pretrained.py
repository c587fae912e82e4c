"""Writes tiny pretrained models with their tokenizers: the folders bert and t5."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", *DIGITS]


def make_tokenizer(ending: str, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {ending}", special_tokens=[(ending, WORDS.index(ending))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", **special)


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "pad_token_id": 0}
    bert = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        **sizes,
    )  # fmt: skip
    # The weights are numbers of bf16: dsjob's masters begin as the weights in fp32, DeepSpeed's as those in bf16.
    BertModel(bert).bfloat16().float().save_pretrained("bert")
    make_tokenizer("[SEP]", cls_token="[CLS]", sep_token="[SEP]").save_pretrained("bert")
    t5 = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=1, **sizes
    )
    T5ForConditionalGeneration(t5).bfloat16().float().save_pretrained("t5")
    make_tokenizer("</s>", eos_token="</s>").save_pretrained("t5")


if __name__ == "__main__":
    main()
