"""Jobs that run in the test's own process: a small model and data, and callbacks that do something at a step."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from job_documents import make_job, resolve
from torch import Tensor, nn

from dsjob import storage
from dsjob.callbacks.callback import Callback, RunView
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import World, join_world
from dsjob.training import job
from dsjob.trust.grant import Trust

TRUST = Trust(prefixes=("small_jobs",), folders=(str(Path(__file__).parent),))
MORE: list[Callable[[RunView, int], None]] = []  # called with each log record, on this process
READ: list[int] = []  # the samples of Parts that this process has read


class Net(nn.Module):
    def __init__(self, dropout: float = 0.2, width: int = 16) -> None:
        super().__init__()
        self.fc, self.drop, self.out = nn.Linear(8, width), nn.Dropout(dropout), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.out(self.drop(torch.relu(self.fc(x)))) - y) ** 2).mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class Deep(nn.Module):
    """A model with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((self.out(x) - y) ** 2).mean()


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, n: int = 40, noisy: bool = False) -> None:
        self.x, self.noisy = torch.randn(n, 8, generator=torch.Generator().manual_seed(0)), noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] + torch.randn(8) * self.noisy
        return x, x.sum(0, keepdim=True)


class Parts(torch.utils.data.IterableDataset[Any]):
    """A stream of Data's samples in shards, which can continue where it stopped; READ tells what was read."""

    def __init__(self, num_shards: int, part: slice = slice(None)) -> None:
        self.num_shards, self._data, self._indices = num_shards, Data(), range(40)[part]
        self._begun = self._position = 0

    def shard(self, num_shards: int, index: int) -> Parts:
        return Parts(1, slice(index, None, num_shards))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._position, self._begun = self._begun, 0
        for index in self._indices[self._position :]:
            self._position += 1
            READ.append(index)
            yield self._data[index]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begun = state["position"]


class Hooks(Callback):
    """Calls what a test has put into MORE."""

    def on_log(self, run: RunView, record: Any) -> None:
        for hook in MORE:
            hook(run, run.step)


def make_document(folder: str | Path, **sections: Any) -> dict[str, Any]:
    """A job of 8 steps in `folder`."""
    trainer = {"train_batch": 8, "max_steps": 8, "log_every": 1, **sections.pop("trainer", {})}
    return make_job(
        **{
            "model": {"_target_": "small_jobs.Net"},
            "data": {"train": {"_target_": "small_jobs.Data"}},
            "trainer": trainer,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
            "callbacks": {"hooks": {"_target_": "small_jobs.Hooks"}},
            "output": {"dir": str(folder)},
            **sections,
        }
    )


def run(document: dict[str, Any], world: World | None = None) -> dict[int, float]:
    """Runs a job on this rank; its losses by step, as metrics.jsonl has them."""
    world = world or join_world(device="cpu")
    resolved = resolve(document, world_size=world.data_size)
    folder = resolved["output"]["dir"]
    storage.make_folder(folder)
    job.run_job(complete_job(resolved), folder, world, TRUST)
    return read_losses(folder)


def train(folder: str | Path, **sections: Any) -> dict[int, float]:
    """`run` of `make_document`."""
    return run(make_document(folder, **sections))


def read_losses(folder: str | Path) -> dict[int, float]:
    """The losses of a run by step; of a step that was taken twice, the last."""
    path = Path(folder, "metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def list_steps(folder: str | Path) -> list[int]:
    """The steps of the committed checkpoints of a run, or below a checkpoint URL."""
    url = str(folder) if "://" in str(folder) else f"{folder}/checkpoints"
    return [int(name[5:13]) for name in storage.list_names(f"{url}/commits") if name.endswith(".json")]


def read_digests(folder: str | Path, step: int) -> dict[str, list[str]]:
    """The sha256 of every chunk of a checkpoint."""
    root = Path(folder, "checkpoints")
    record = json.loads((root / "commits" / f"step-{step:08d}.json").read_text())
    manifest = json.loads((root / record["dir"] / "manifest.json").read_text())
    return {name: [chunk["sha256"] for chunk in tensor["chunks"]] for name, tensor in manifest["tensors"].items()}


def at_step(step: int, action: Callable[[], None]) -> Callable[[RunView, int], None]:
    """A hook that acts once a step was taken and logged."""
    return lambda run, now: action() if now == step else None


def send(number: int) -> None:
    """A signal to this process."""
    os.kill(os.getpid(), number)


SIGTERM, SIGUSR1 = signal.SIGTERM, signal.SIGUSR1


def make_loader(n: int = 40, **options: Any) -> torch.utils.data.DataLoader[Any]:
    """What a job may have as data.train in place of a dataset."""
    return torch.utils.data.DataLoader(Data(n), **options)


def divide(dataset: Any, batch_size: int, rank: int, world_size: int) -> list[Any]:
    """A data.loader that divides the samples itself."""
    loader = torch.utils.data.DataLoader(dataset, batch_size)
    return list(loader)[rank::world_size]


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Samples without a length, `n` of them on rank 0 and `less` fewer on the others."""

    def __init__(self, n: int = 40, less: int = 0) -> None:
        self.data = Data(n - less * (int(os.environ.get("RANK", "0")) > 0))

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


def make_shorter(n: int = 40) -> Data:
    """A dataset with one sample less on rank 1."""
    return Data(n - int(os.environ.get("RANK", "0")))
