"""Jobs that do not fit into a limit on memory: they train with their state on a disk, and only so."""

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

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
        self.tanh = nn.Tanh()

    def forward(self, x):
        return x + self.tanh(self.layer(x)) / 96

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(96))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
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
# 101M parameters take 404 MB, as many with gradients, and AdamW's state takes 808: 1616 MB in memory.
LIMITS = {"state": 1550 << 20, "parameters and state": 1000 << 20}


def run(folder: Path, name: str, limit: int, zero: dict[str, Any]) -> tuple[int, list[float]]:
    job = {**JOB, "zero_optimization": zero, "output": {"dir": name}}
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
@pytest.mark.parametrize("what", list(LIMITS))
def test_a_job_trains_within_a_limit_that_is_less_than_its_state(what: str, tmp_path: Path) -> None:
    (tmp_path / "big_model.py").write_text(MODEL)
    place = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "buffer_count": 2}
    state = {"stage": 2, "offload_optimizer": place}
    both = {"stage": 3, "offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    # The same with less on the disk.
    less = {"stage": 2} if what == "state" else {**both, "offload_param": {"device": "cpu"}}
    unlimited = run(tmp_path, "unlimited", resource.RLIM_INFINITY, {"stage": 2})
    assert (unlimited[0], len(unlimited[1])) == (0, 3)
    assert run(tmp_path, "in_memory", LIMITS[what], less)[0] != 0
    assert run(tmp_path, "on_disk", LIMITS[what], state if what == "state" else both) == unlimited
