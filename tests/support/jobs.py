"""Small jobs with a model and data of the user's own, and the `dsjob` command to run them with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from forks import Rank, begin_anew, get_forks

DSJOB = str(Path(sys.executable).with_name("dsjob"))
TESTS = Path(__file__).parent.parent
RANKS = "ranks"  # the file with the process ids of the ranks that a command has started

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
    """Runs the command to its end, in a process of its own: a fork (`call`), or, `fresh`, a new interpreter."""
    command, environment = [DSJOB, *arguments], clean_env(**env)
    if fresh:
        return subprocess.run(
            command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout, check=False
        )
    with tempfile.TemporaryDirectory() as folder:
        process = get_forks().Process(target=call, args=(command, str(cwd), environment, folder))
        process.start()
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(command, timeout)
        finally:
            process.kill()
        outputs = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, process.exitcode, *outputs)


def call(command: Sequence[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    """Runs the command in this process, a fork, and its ranks in forks of this one, with their process ids in RANKS.

    All is as in production but how a rank begins: new interpreters would take seconds to import torch, and differ in
    their hash seeds.
    """
    enter(command, cwd, environment, folder)
    from dsjob.launch import supervisor

    def start(command: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None) -> Rank:
        rank = Rank(command, env, output)
        with open(f"{folder}/{RANKS}", "a") as file:
            file.write(f"{rank.pid}\n")
        return rank

    supervisor.start_process = start
    from dsjob.cli import main

    sys.exit(main())


def enter(command: Sequence[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    """Makes this process, a fork, what the command's script finds: its sys.path, its arguments; output to `folder`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    begin_anew(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    root, tests = str(TESTS.parent), str(TESTS)
    installed = [path for path in sys.path if path not in ("", root) and not path.startswith(tests)]
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(DSJOB).parent), *given, *installed]
    sys.argv[:] = command


def clean_env(**changes: str) -> dict[str, str]:
    """This environment without what a launcher of ranks may have left in it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DSJOB_STORE")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, "OMP_NUM_THREADS": "1", **changes}


def read_metrics(run: Path, key: str = "loss") -> dict[int, float]:
    """The values of one metric by step; of a step that was taken twice, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def list_commits(run: Path) -> list[str]:
    """The tags of the committed checkpoints of a run."""
    return sorted(path.stem for path in (run / "checkpoints" / "commits").glob("*.json"))
