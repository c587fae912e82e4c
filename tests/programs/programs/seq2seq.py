"""Teaches a pretrained T5 to repeat digits in reverse with Seq2SeqTrainer, and measures what it generates."""

import json
import random
import sys

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make_dataset(count: int, seed: int, tokenizer: AutoTokenizer) -> Dataset:
    draw = random.Random(seed)
    rows = [[draw.choice(DIGITS) for _ in range(draw.randint(2, 4))] for _ in range(count)]
    given = {"source": [" ".join(row) for row in rows], "target": [" ".join(row[::-1]) for row in rows]}
    return Dataset.from_dict(given).map(
        lambda batch: tokenizer(batch["source"], text_target=batch["target"], max_length=8, truncation=True),
        batched=True,
        remove_columns=["source", "target"],
    )


def main() -> None:
    start, *words = sys.argv[1:]
    [args] = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForSeq2SeqLM.from_pretrained(start)

    def measure(prediction) -> dict:
        tokens = [np.where(part == -100, 0, part) for part in (prediction.predictions, prediction.label_ids)]
        texts, labels = (tokenizer.batch_decode(part, skip_special_tokens=True) for part in tokens)
        pairs = list(zip(texts, labels, strict=True))
        return {
            "exact_match": float(np.mean([text == label for text, label in pairs])),
            "length": float(np.mean([len(text.split()) for text, _ in pairs])),
            "same_words": float(np.mean([len(set(a.split()) & set(b.split())) for a, b in pairs])),
        }

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=make_dataset(64, 0, tokenizer),
        eval_dataset=make_dataset(20, 1, tokenizer),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=measure,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate(max_length=8, num_beams=2)
    prediction = trainer.predict(make_dataset(14, 2, tokenizer), max_length=8)
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open("records.json", "w") as file:
            generated = np.asarray(prediction.predictions).tolist()
            json.dump({"log": trainer.state.log_history, "metrics": metrics, "generated": generated}, file)


if __name__ == "__main__":
    main()
