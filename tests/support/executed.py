"""A program that `dsjob exec` runs, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from jobs import dsjob

TRAIN = """
import argparse, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--at", default="")
parser.add_argument("--do", default="")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

import torch
import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}

def fail():
    if args.do == "raise":
        raise ValueError("boom")
    if args.do == "config":
        deepspeed.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_sizee": 2})
    if args.do == "engine":
        engine.backward(torch.ones(2, requires_grad=True))
    if args.do == "hang":
        time.sleep(600)
    if args.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print("last words")
    sys.exit(0 if args.do == "leave" else 7)

torch.manual_seed(0)
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=CONFIG)
rank = engine.global_rank
for step in range(args.steps):
    for micro in range(2):
        loss = engine(torch.ones(2, 4) * (rank + micro + 1)).square().mean()
        if args.at == str(rank) and step == 1:
            fail()
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} step {step} {loss.item()}", flush=True)
"""


UNUSED = "rank 0 has not called deepspeed.initialize, so dsjob's engine was not used"


def execute(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return dsjob("exec", "--run-dir", "run", *words, cwd=folder, **env)


def read_result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "run/result.json").read_text())
    return result


def wait_for(folder: Path, *names: str) -> None:
    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end
        time.sleep(0.02)
