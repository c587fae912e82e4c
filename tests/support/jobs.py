"""Small jobs with a model and data of the user's own, and the `dsjob` command to run them with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from programs import DSJOB, clean_env, run_program

MODULE = """
import time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.out(torch.relu(self.fc(x)))

class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks, self.drop, self.head = nn.ModuleList([Block(), Block()]), nn.Dropout(dropout), nn.Linear(8, 1)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return ((self.head(self.drop(x)) - y) ** 2).mean()

def build(dropout=0.0):
    return Net(dropout)

class Data(torch.utils.data.Dataset):
    def __init__(self, n=64, seed=0, pause=0.0):
        self.x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
        self.pause = pause

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        time.sleep(self.pause)
        return self.x[i], self.x[i].sum(0, keepdim=True)

class NoLoss(Net):
    def forward(self, x, y):
        return {"logits": x}

class Nan(Net):
    def forward(self, x, y):
        return super().forward(x, y) * float("nan")

class Crash(Net):
    def forward(self, x, y):
        raise ValueError("shapes do not fit")

class CrashOnRank1(Net):
    def forward(self, x, y):
        import torch.distributed as dist
        if dist.get_rank() == 1:
            raise ValueError("rank 1 has had enough")
        return super().forward(x, y)

class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x)

def not_a_model():
    return 7

def square(outputs, batch):
    return (outputs - batch[1]).square().mean()

def half(outputs, batch):
    return 0.5

class NanGradient(Net):
    calls = 0

    def forward(self, x, y):
        NanGradient.calls += 1
        loss = super().forward(x, y)
        # sqrt has an infinite slope at 0, and inf * 0 is nan: the loss itself stays finite
        return loss + 0 * torch.sqrt(loss * 0) if NanGradient.calls == 4 else loss

class NanGradients(Net):
    def forward(self, x, y):
        loss = super().forward(x, y)
        return loss + 0 * torch.sqrt(loss * 0)

class NanOnce(Net):
    calls = 0

    def forward(self, x, y):
        NanOnce.calls += 1
        return super().forward(x, y) * (float("nan") if NanOnce.calls == 4 else 1.0)

class Noisy(Data):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + torch.randn(8), y

def inputs_only(items):
    return torch.stack([x for x, _ in items])
"""


def make_job(folder: Path, **changes: Any) -> Path:
    """Writes my_model.py and cfg.json to `folder`; `changes` replace sections of the document."""
    (folder / "my_model.py").write_text(MODULE)
    document = {
        "model": {"_target_": "my_model.build"},
        "data": {"train": {"_target_": "my_model.Data"}, "eval": {"_target_": "my_model.Data", "n": 10, "seed": 1}},
        "trainer": {"train_batch": 8, "max_steps": 6, "log_every": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "output": {"dir": "run"},
        **changes,
    }
    (folder / "cfg.json").write_text(json.dumps(document, indent=2))
    return folder


def dsjob(
    *arguments: str, cwd: Path, timeout: float = 120, fresh: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end, in a process of its own: a fork (`programs`), or, `fresh`, a new interpreter."""
    command, environment = [DSJOB, *arguments], clean_env(**env)
    if fresh:
        return subprocess.run(
            command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout, check=False
        )
    return run_program(command, cwd=cwd, env=environment, timeout=timeout)


def read_metrics(run: Path, key: str = "loss") -> dict[int, float]:
    """The values of one metric by step; of a step that was taken twice, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def list_commits(run: Path) -> list[str]:
    """The tags of the committed checkpoints of a run."""
    return sorted(path.stem for path in (run / "checkpoints" / "commits").glob("*.json"))
