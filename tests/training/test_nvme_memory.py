"""A job whose optimizer state does not fit into a limit on memory: it trains with the state on a disk, and only so."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import clean_env

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(96))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x)) / 96
        return x.square().mean()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randn(1024, generator=torch.Generator().manual_seed(i))
"""
JOB: dict[str, Any] = {
    "model": {"_target_": "big_model.Net"},
    "data": {"train": {"_target_": "big_model.Data"}},
    "trainer": {"max_steps": 3, "train_batch": 8, "log_every": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "checkpoint": {"every": 2, "keep": 1},
    "ops": {"cpu_optimizers": "off"},
}
LIMIT = 1550 << 20  # bytes; 101M parameters with gradients and AdamW's state take 1616 MiB in memory, 808 without state


def run(folder: Path, name: str, limit: int, offload: dict[str, Any]) -> tuple[int, list[float]]:
    job = {**JOB, "zero_optimization": {"stage": 2, **offload}, "output": {"dir": name}}
    (folder / f"{name}.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "dsjob", "run", f"{name}.json"]
    cap = (limit, resource.getrlimit(resource.RLIMIT_DATA)[1])
    env = {**clean_env(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=folder, env=env, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, cap), check=False
    )
    lines = (folder / name / "metrics.jsonl").read_text().splitlines() if ended.returncode == 0 else []
    return ended.returncode, [json.loads(line)["loss"] for line in lines]


@pytest.mark.full
@pytest.mark.slow
def test_a_job_trains_within_a_limit_that_its_optimizer_state_exceeds(tmp_path: Path) -> None:
    (tmp_path / "big_model.py").write_text(MODEL)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "disk")}}
    unlimited = run(tmp_path, "unlimited", resource.RLIM_INFINITY, {})
    assert (unlimited[0], len(unlimited[1])) == (0, 3)
    assert run(tmp_path, "in_memory", LIMIT, {})[0] != 0
    assert run(tmp_path, "on_disk", LIMIT, disk) == unlimited
