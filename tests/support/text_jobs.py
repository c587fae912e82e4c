"""A job that trains a tiny GPT-2 over bytes, and generates in evaluation and prediction."""

from __future__ import annotations

SENTENCES = """
import torch

class Sentences(torch.utils.data.Dataset):
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, i):
        ids = torch.tensor(list(b"some words %02d" % i))
        labels = ids.clone()
        labels[: 4 + i % 3] = -100
        return {"input_ids": ids, "labels": labels}

def share(preds, target):
    assert len(preds) == len(target) and all(isinstance(each, str) for each in preds + target)
    return sum(len(each) for each in preds) / len(preds)

def build():
    import transformers
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=257, eos_token_id=256)
    return transformers.GPT2LMHeadModel(config)
"""
JOB = """
model: {_target_: sentences.build}
data:
  train: {_target_: sentences.Sentences, size: 8}
  eval: {_target_: sentences.Sentences, size: 7}
trainer: {micro_batch: 2, grad_accum: 1, max_steps: 1}
optimizer: {type: AdamW, params: {lr: 0.0}}
generation: {tokenizer: bytes, max_new_tokens: 5}
metrics: {share: {_target_: sentences.share, inputs: {preds: outputs.text, target: outputs.reference}}}
tasks: [train, eval, predict]
zero_optimization: {stage: 3}
"""
