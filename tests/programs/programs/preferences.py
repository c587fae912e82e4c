"""Tunes a tiny Llama with TRL: `sft` on texts, or `dpo` on pairs of answers. --use_peft: an adapter, else all weights.

First argument: sft or dpo; then the arguments of SFTConfig or DPOConfig and of ModelConfig.
"""

import json
import random
import sys

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def count(start: int, length: int, step: int) -> str:
    """Words such as "two then four then six"."""
    return " then ".join(NUMBERS[(start + step * at) % len(NUMBERS)] for at in range(length))


def make_dataset(method: str, rows: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    data = []
    for _ in range(rows):
        start, length = draw.randrange(9), draw.randrange(3, 8)
        if method == "sft":
            data.append({"text": count(start, length, 1)})
        else:
            prompt = count(start, 2, 1) + " then "
            data.append(
                {"prompt": prompt, "chosen": count(start + 2, length, 1), "rejected": count(start + 2, length, 2)}
            )
    return Dataset.from_list(data)


def main() -> None:
    method = sys.argv[1]
    kind, trainer_type = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[method]
    args, model_args = TrlParser((kind, ModelConfig)).parse_args_and_config(sys.argv[2:])
    trainer = trainer_type(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=make_dataset(method, 96, seed=0),
        eval_dataset=make_dataset(method, 24, seed=1),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open("records.json", "w") as file:
            json.dump(trainer.state.log_history, file)


if __name__ == "__main__":
    main()
