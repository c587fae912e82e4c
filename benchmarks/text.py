"""Compares ways to batch texts of different lengths: padded, grouped by length, and packed into windows.

    python -m benchmarks.text [--rounds 5] [--steps 8] [--width 128] [--json benchmarks/results/text.json]

A small Llama trains on the same texts, whose lengths are lognormal. All sides have equally many ids in a batch on
average. A figure is the number of targets learnt per CPU second; the ratio to padding is the median over rounds, in
which the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dsjob.data import load_training
from dsjob.ranks.mesh import World
from dsjob.text import Pad, Text

LENGTH, BATCH = 512, 8
WORLD = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))


def write_texts(path: Path, count: int) -> None:
    """Texts of 30 to 500 bytes, most of them short."""
    draw = random.Random(0)
    sizes = [min(500, max(30, round(draw.lognormvariate(4.8, 0.7)))) for _ in range(count)]
    path.write_text("\n".join("".join(draw.choices("abcdefgh ", k=size)).replace(" ", "_") for size in sizes) + "\n")


def make_model(width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))


def make_sides(path: Path) -> dict[str, Iterator[Any]]:
    """The batches of each side, endlessly."""
    texts = Text(str(path), max_length=LENGTH)
    windows = Text(str(path), max_length=LENGTH, pack=True)
    mean = float(texts.lengths.mean())
    packed = max(1, round(BATCH * 4 * mean / LENGTH))
    common: dict[str, Any] = {"world": WORLD, "seed": 0, "collate": Pad()}
    return {
        "padded": iter(load_training(texts, micro_batch=BATCH * 4, **common)),
        "grouped": iter(load_training(texts, micro_batch=BATCH * 4, grouped=BATCH * 4, **common)),
        "packed": iter(load_training(windows, micro_batch=packed, **common)),
    }


def measure(model: Any, batches: Iterator[Any], steps: int) -> float:
    """Targets per CPU second of forward and backward passes."""
    targets, began = 0, time.process_time()
    for batch in islice(batches, steps):
        model(**batch).loss.backward()
        model.zero_grad()
        targets += int((batch["labels"][:, 1:] != -100).sum())
    return targets / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="batches of each side per round")
    parser.add_argument("--width", type=int, default=128, help="hidden size of the model")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.txt"
        write_texts(path, 4000)
        sides, model = make_sides(path), make_model(args.width)
        for batches in sides.values():
            measure(model, batches, 1)
        rounds = [
            {name: measure(model, batches, args.steps) for name, batches in sides.items()} for _ in range(args.rounds)
        ]
    cells = [
        {
            "side": name,
            "targets_per_cpu_second": round(statistics.median(found[name] for found in rounds)),
            "ratio_to_padded": round(statistics.median(found[name] / found["padded"] for found in rounds), 2),
        }
        for name in sides
    ]
    for cell in cells:
        print(f"{cell['side']:8}  {cell['targets_per_cpu_second']:>8,} targets/CPU s  {cell['ratio_to_padded']:.2f}")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"cells": cells, "rounds": args.rounds, "torch": torch.__version__}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
