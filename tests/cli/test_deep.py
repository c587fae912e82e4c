"""`dsjob validate --deep`: targets are imported and their arguments checked, with places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jobs import dsjob, make_job

MODULE = """
import functools
import torch
print("noise")

class Net(torch.nn.Module):
    def __init__(self, hidden, depth=1):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x)

class Open:
    def __init__(self, **anything):
        raise SystemError("called")

three = functools.partial(Net, hidden=3)

def collate(samples, pad=0):
    return torch.stack([sample for sample, in samples])

def loss(outputs, batch, *, weight=1.0):
    return weight * outputs.mean()
"""
SOUND = """\
model: {_target_: deep_module.Net, hidden: 3}
data:
  train: {_target_: torch.utils.data.TensorDataset, _args_: [{_target_: torch.zeros, _args_: [[8, 4]]}]}
  collate: {_target_: deep_module.collate, pad: 1}
loss: {_target_: deep_module.loss, weight: 2}
callbacks: {a: {_target_: deep_module.Open, x: 1}, b: {_target_: deep_module.three, depth: 2}}
trainer: {train_batch: 8, max_steps: 3}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}
"""

METRICS = """\
metrics:
  a: {_target_: deep_module.loss, weight: 2, inputs: {outputs: outputs.x, batch: batch.y}, phases: [train]}
  b: {_target_: deep_module.loss, phases: [train], reduce: {_target_: deep_module.collate, pad: 1}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "deep_module.py").write_text(MODULE)
    (tmp_path / "cfg.yaml").write_text(SOUND)
    return tmp_path


def test_a_sound_document_is_ok_and_callbacks_are_not_built(job: Path) -> None:
    done = dsjob("validate", "--deep", "cfg.yaml", cwd=job)
    assert (done.returncode, done.stdout) == (0, "cfg.yaml: ok\n"), done.stderr
    assert done.stderr == "noise\n"


def test_what_a_metric_receives_is_no_argument_of_it(job: Path) -> None:
    (job / "cfg.yaml").write_text(SOUND + METRICS)
    told = dsjob("validate", "--deep", "cfg.yaml", cwd=job).stderr
    assert "error[one-batch]" in told  # the outputs have no x, so the arguments have passed
    assert "error[target]" not in told


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "Net, hidden",
            "Net, hiden",
            'cfg.yaml:1:36: error[target]: model.hiden: deep_module.Net has no argument "hiden"; did you mean "hidden"',
        ),
        (
            ", hidden: 3",
            "",
            'cfg.yaml:1:9: error[target]: model._target_: deep_module.Net needs the argument "hidden"',
        ),
        (
            "{_target_: torch.zeros, _args_",
            "{_target_: torch.zeroes, _args_",
            "cfg.yaml:3:63: error[untrusted-target]: data.train._args_[0]._target_: torch.zeroes is not trusted: ",
        ),
        (
            "pad: 1",
            "padd: 1",
            'cfg.yaml:4:44: error[target]: data.collate.padd: deep_module.collate has no argument "padd"',
        ),
        ("weight: 2", "wait: 2", 'cfg.yaml:5:36: error[target]: loss.wait: deep_module.loss has no argument "wait"'),
        ("three, depth", "three, dept", "cfg.yaml:6:85: error[target]: callbacks.b.dept: deep_module.three has no"),
        ("SGD, lr", "SGD, rl", 'cfg.yaml:8:40: error[target]: optimizer.rl: torch.optim.SGD has no argument "rl"'),
        (
            "step_size",
            "stepsize",
            "cfg.yaml:9:56: error[target]: scheduler.stepsize: torch.optim.lr_scheduler.StepLR has",
        ),
        (
            "deep_module.Open",
            "deep_module.Opne",
            "cfg.yaml:6:17: error[target]: callbacks.a._target_: cannot import deep_module.Opne: deep_module has no",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_argument_has_a_place_and_the_name_that_was_meant(job: Path, right: str, wrong: str, told: str) -> None:
    assert right in SOUND
    (job / "cfg.yaml").write_text(SOUND.replace(right, wrong))
    done = dsjob("validate", "--deep", "cfg.yaml", cwd=job)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line != "noise"]
    assert len(errors) == 1, errors
    assert errors[0].startswith(told), errors
    if "trusted" not in told:
        assert dsjob("validate", "cfg.yaml", cwd=job).returncode == 0


def test_a_module_that_cannot_be_imported_is_placed(job: Path) -> None:
    (job / "deep_module.py").write_text("x = 1\ndef f(:\n")
    done = dsjob("validate", "--deep", "cfg.yaml", "--format", "json", cwd=job)
    found = {problem["path"]: problem for problem in json.loads(done.stdout)}
    assert set(found) == {
        "model._target_",
        "data.collate._target_",
        "loss._target_",
        "callbacks.a._target_",
        "callbacks.b._target_",
    }
    assert f"{job}/deep_module.py:2:7: SyntaxError" in found["model._target_"]["message"]


def test_trust_is_decided_as_for_a_run(job: Path) -> None:
    text = SOUND.replace("{_target_: deep_module.Open, x: 1}", "{_target_: fractions.Fraction}")
    (job / "cfg.yaml").write_text(text)
    done = dsjob("validate", "--deep", "cfg.yaml", cwd=job)
    assert "error[untrusted-target]: callbacks.a._target_: fractions.Fraction is not trusted" in done.stderr
    assert done.returncode == 2
    assert dsjob("validate", "--deep", "--trust", "fractions.Fraction", "cfg.yaml", cwd=job).returncode == 0
    assert dsjob("validate", "cfg.yaml", cwd=job).returncode == 2


def test_a_run_tells_a_wrong_argument_with_its_place(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "my_model.build", "dropuot": 0.1})
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 2
    said = 'model.dropuot: my_model.build has no argument "dropuot"'
    assert done.stderr == f'cfg.json:4:5: error[target]: {said}; did you mean "dropout"?\n'
    on_ranks = dsjob("cfg.json", "launch.nproc=2", cwd=tmp_path)
    assert (on_ranks.returncode, on_ranks.stderr) == (2, done.stderr)


def test_data_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    make_job(tmp_path, data={"train": {"_target_": "my_model.Data", "n": "many"}})
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("dsjob: error: cfg.json:7:7: data.train: TypeError: "), done.stderr
    assert f"({tmp_path}/my_model.py:" in done.stderr


ROLES = """
import torch

class Module(torch.nn.Module):
    def forward(self, outputs): ...

class Callable:
    def __call__(self, outputs, batch, scale): ...

class Sound:
    def __call__(self, outputs, batch, scale=1): return outputs.mean()

def four(outputs, batch, scale, more): return outputs.mean()
"""


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("{_target_: roles.Module}", "roles.Module takes 1 positional argument, not 2"),
        ("{_target_: roles.Callable}", 'roles.Callable needs the argument "scale"'),
        ("{_target_: roles.four, more: 1}", 'roles.four needs the argument "scale"'),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_at_its_place_by_validate_and_run(
    job: Path, target: str, told: str
) -> None:
    (job / "roles.py").write_text(ROLES)
    (job / "cfg.yaml").write_text(SOUND.replace("{_target_: deep_module.loss, weight: 2}", target))
    done = dsjob("validate", "--deep", "cfg.yaml", cwd=job)
    assert f"cfg.yaml:5:8: error[target]: loss._target_: {told}; loss is called with (outputs, batch)" in done.stderr
    make_job(job, loss=yaml.safe_load(target))
    done = dsjob("cfg.json", cwd=job)
    assert done.returncode == 2
    assert f"loss._target_: {told}" in done.stderr
    assert "cfg.json:" in done.stderr


def test_a_loss_that_can_be_called_is_ok(job: Path) -> None:
    (job / "roles.py").write_text(ROLES)
    for target in ("{_target_: roles.Sound}", "{_target_: roles.four, scale: 1, more: 2}"):
        (job / "cfg.yaml").write_text(SOUND.replace("{_target_: deep_module.loss, weight: 2}", target))
        assert dsjob("validate", "--deep", "cfg.yaml", cwd=job).stdout == "cfg.yaml: ok\n"
