"""Fine-tunes a pretrained encoder with a new head to classify sentences, as run_glue.py of transformers does."""

import json
import random
import sys

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make_dataset(count: int, seed: int, tokenizer: AutoTokenizer) -> Dataset:
    """Sentences of three to eight digits. The label says which third of the digits the first word is from."""
    draw = random.Random(seed)
    rows = [[draw.randrange(10) for _ in range(draw.randint(3, 8))] for _ in range(count)]
    sentences = [" ".join(DIGITS[digit] for digit in row) for row in rows]
    dataset = Dataset.from_dict({"sentence": sentences, "label": [min(row[0] // 3, 2) for row in rows]})
    return dataset.map(lambda batch: tokenizer(batch["sentence"]), batched=True)


def measure(prediction) -> dict:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


def main() -> None:
    start, *words = sys.argv[1:]
    [args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=3)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=make_dataset(64, 0, tokenizer),
        eval_dataset=make_dataset(20, 1, tokenizer),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=measure,
    )
    if args.do_train:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    prediction = trainer.predict(make_dataset(14, 2, tokenizer))
    if args.do_train:
        trainer.save_model()
    if trainer.is_world_process_zero():
        records = {
            "log": trainer.state.log_history,
            "metrics": metrics,
            "test": prediction.metrics,
            "logits": prediction.predictions.tolist(),
        }
        with open("records.json", "w") as file:
            json.dump(records, file)


if __name__ == "__main__":
    main()
