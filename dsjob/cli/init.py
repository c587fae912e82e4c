"""`dsjob init`: creates a small project that is ready to train, as a starting point for one's own."""

from __future__ import annotations

import os
from importlib.util import find_spec

from dsjob.cli.flags import make_parser
from dsjob.errors import StorageError, UsageError
from dsjob.terminal import print_lines, quote_path

_JOB = """\
# dsjob validate job.yaml      checks it
# dsjob job.yaml               trains; `dsjob job.yaml trainer.max_steps=100` changes a value
# dsjob schema trainer         explains a section
model: {_target_: my_project.model.Net, hidden: 32}
data:
  train: {_target_: my_project.data.Circles, size: 2048, seed: 0}
  eval: {_target_: my_project.data.Circles, size: 512, seed: 1}
trainer: {train_batch: 64, max_steps: 200, log_every: 20, eval_every: 100}
optimizer: {type: AdamW, params: {lr: 1e-2}}
metrics:
  accuracy: {_target_: my_project.metric.accuracy}
callbacks:
  record: {_target_: my_project.callback.Record}
checkpoint: {every: 100, best: {metric: eval/accuracy, mode: max}}
output: {dir: outputs/%time}
"""

_MODEL = '''\
"""The model: a torch.nn.Module whose forward takes a batch and returns the loss."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """points: (batch, 2); labels: (batch). The keys of a sample are the names of the arguments."""
        logits = self.layers(points)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
'''

_DATA = '''\
"""The data: anything with a length whose items are samples."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Circles(Dataset[dict[str, Tensor]]):
    """Points in a square; the label is 1 for points inside a circle and 0 outside."""

    def __init__(self, size: int, seed: int) -> None:
        self.points = 2 * torch.rand(size, 2, generator=torch.Generator().manual_seed(seed)) - 1
        self.labels = (self.points.norm(dim=1) < 0.8).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"points": self.points[index], "labels": self.labels[index]}
'''

_METRIC = '''\
"""A metric: a function of outputs and batch. dsjob averages it over the evaluation set."""

from torch import Tensor


def accuracy(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (outputs["logits"].argmax(dim=1) == batch["labels"]).float().mean()
'''

_CALLBACK = '''\
"""A callback: your own code that runs during training. Checkpoints store what `state_dict` returns."""

from collections.abc import Mapping

from dsjob import Callback, RunView


class Record(Callback):
    """Reports each evaluation that is better than all earlier ones."""

    def __init__(self) -> None:
        self.best = 0.0

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if metrics["eval/accuracy"] > self.best:
            self.best = metrics["eval/accuracy"]
            run.say("record", f"accuracy {self.best:.1%} at step {run.step}")

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]
'''

_TEST = '''\
"""Tests for pytest."""

from pathlib import Path

import dsjob

JOB = Path(__file__).with_name("job.yaml")


def test_the_job_is_valid() -> None:
    assert dsjob.validate(JOB, deep=True) == []


def test_the_model_learns(tmp_path: Path) -> None:
    result = dsjob.run(JOB, overrides=["trainer.max_steps=50", f"output.dir={tmp_path}/run"])
    assert result.metrics["eval/accuracy"] > 0.7
    assert dsjob.load_model(result.checkpoint).layers[0].weight.isfinite().all()
'''

FILES = {
    "job.yaml": _JOB,
    "my_project/__init__.py": "",
    "my_project/model.py": _MODEL,
    "my_project/data.py": _DATA,
    "my_project/metric.py": _METRIC,
    "my_project/callback.py": _CALLBACK,
    "test_job.py": _TEST,
}


def main(arguments: list[str], debug: bool) -> int:
    """Writes the files and prints the next commands."""
    parser = make_parser(
        "init",
        "Create a small project that is ready to train: a job file, a model, data, a metric, a callback and a test.",
        ("dsjob init", "dsjob init my_folder"),
    )
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="folder to write to (default: the current one)"
    )
    folder = parser.parse_args(arguments).folder
    if os.path.isfile(folder) or folder.endswith((".yaml", ".yml", ".json")):
        raise UsageError(
            f"{folder} is not a folder; dsjob init writes a project of {len(FILES)} files",
            hint="name a folder: dsjob init FOLDER",
        )
    there = [name for name in FILES if os.path.lexists(os.path.join(folder, name))]
    if there:
        raise UsageError(
            f"{folder} already has {', '.join(there)}; nothing was written",
            hint="use another folder: dsjob init FOLDER",
        )
    try:
        for name, text in FILES.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            print_lines(f"wrote {os.path.normpath(path)}")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="use another folder") from error
    enter = "" if os.path.normpath(folder) == "." else f"cd {quote_path(folder)} && "
    # dsjob itself does not need pytest, so it may be missing.
    test = "python -m pytest" if find_spec("pytest") else "pip install pytest && python -m pytest"
    lines = (("train", "dsjob job.yaml"), ("test", test), ("check", "dsjob validate --deep job.yaml"))
    print_lines("next", *(f"  {name:<10} {enter}{command}" for name, command in lines))
    return 0
