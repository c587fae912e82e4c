"""Trains a tiny Llama from scratch with the HF Trainer."""

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    """Sequences of tokens in which the next token mostly follows from the last."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (count, 16), generator=draw)
        self.tokens = (steps.cumsum(1) + torch.randint(0, 32, (count, 1), generator=draw)) % 32

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    [args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Sentences(96, seed=0),
        eval_dataset=Sentences(24, seed=1),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open("records.json", "w") as file:
            json.dump(trainer.state.log_history, file)


if __name__ == "__main__":
    main()
