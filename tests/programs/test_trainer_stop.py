"""A program of Hugging Face's Trainer saves when a signal asks it to end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from programs import DSJOB, Program

pytest.importorskip("transformers")

PROGRAM = """
import os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"input_ids": torch.arange(8) + index % 10, "labels": torch.arange(8) + index % 10}

class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            open(f"ready{args.process_index}", "w")

sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, save_strategy="no", report_to=[], use_cpu=True, max_steps=100000,
    disable_tqdm=True, deepspeed={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}},
)
trainer = Trainer(model=LlamaForCausalLM(LlamaConfig(**sizes)), args=args, train_dataset=Data(), callbacks=[Tell])
trainer.train()
"""


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    program = Program([DSJOB, "exec", "--num_gpus", "2", "train.py"], cwd=tmp_path)
    end = time.monotonic() + 120
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert program.poll() is None, program.stderr
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(program.pid, signal.SIGTERM)
    _, stderr = program.communicate()
    assert program.returncode == 75, stderr
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"dsjob: stopped by SIGTERM after saving out/{saved.name}\n" in stderr
    state = json.loads((saved / "trainer_state.json").read_text())
    assert state["global_step"] == int(saved.name.partition("-")[2])
    assert list((saved / "commits").iterdir())
