"""Tunes a tiny Llama with TRL by rewards for its own answers: first argument grpo or rloo; then the arguments of
GRPOConfig or RLOOConfig and of ModelConfig. --use_peft: an adapter, else all weights.
"""

import json
import random
import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer, TrlParser, get_peft_config

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def count_sevens(completions: list[str], **rest: object) -> list[float]:
    return [float(text.split().count("seven")) for text in completions]


def main() -> None:
    method = sys.argv[1]
    kind, trainer_type = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[method]
    args, model_args = TrlParser((kind, ModelConfig)).parse_args_and_config(sys.argv[2:])
    draw = random.Random(0)
    prompts = [" then ".join(draw.choices(NUMBERS, k=draw.randrange(2, 5))) + " then" for _ in range(64)]
    trainer = trainer_type(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        reward_funcs=count_sevens,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open("records.json", "w") as file:
            json.dump(trainer.state.log_history, file)


if __name__ == "__main__":
    main()
