"""What the command suggests: next commands that work, the right spelling of overrides, what a recipe lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser
from jobs import dsjob, make_job

from dsjob.cli import main
from dsjob.cli.overrides import require_overrides
from dsjob.contract.lengths import read_length
from dsjob.errors import UsageError
from dsjob.training.advice import count_too_few_cores, train_longer, wait_longer

PRETRAINED = """
class Config:
    def to_json_string(self):
        return '{"model_type": "own"}'

class Pretrained(Net):
    config = Config()
"""


@pytest.mark.parametrize(
    ("limits", "step", "epochs", "longer"),
    [
        ((6, None), 6, 0.5, "trainer.max_steps=12"),
        ((6, None), 24, 2.0, "trainer.max_steps=48"),
        ((None, 3), 24, 3.0, "trainer.max_epochs=6"),
        ((None, 3), 48, 6.0, "trainer.max_epochs=12"),
        ((None, 3), 100, 12.5, "trainer.max_epochs=26"),
        ((None, 0.1), 1, 0.125, "trainer.max_epochs=0.2"),
        ((6, 3), 6, 0.5, "trainer.max_steps=12 trainer.max_epochs=6"),
        ((6, None), 6, None, "trainer.max_steps=12"),
        ((None, None, "1.5e6tok"), 6, None, "trainer.max_length=3000000tok"),
        ((None, None, "2ep"), 9, 4.5, "trainer.max_length=10ep"),
        ((None, None, "3ep"), 38, 3.04, "trainer.max_length=6ep"),
        ((None, None, 7), 9, 4.5, "trainer.max_length=14"),
    ],
)
def test_a_longer_run_is_longer_than_the_one_so_far(
    limits: tuple[Any, ...], step: int, epochs: float | None, longer: str
) -> None:
    steps, most, *lengths = limits
    length = read_length(lengths[0]) if lengths else None
    assert train_longer(steps, most, length, step=step, epochs=epochs) == longer


def test_a_run_that_has_stopped_early_needs_more_patience() -> None:
    early = {"_target_": "dsjob.callbacks.EarlyStopping"}
    callbacks = {"other": {"_target_": "my.Own"}, "a": {**early, "metric": "eval/f1", "patience": 4}, "b": early}
    assert wait_longer(callbacks, "eval/f1 has not improved in 4 evaluations") == "callbacks.a.patience=8"
    assert wait_longer(callbacks, "eval/loss has not improved in 3 evaluations") == "+callbacks.b.patience=6"
    assert wait_longer(callbacks, "100 steps of this start are done") == ""


def test_epochs_that_were_passed_are_not_suggested(tmp_path: Path) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_epochs": 1, "log_every": 1})
    assert dsjob("cfg.json", "trainer.max_epochs=2", cwd=tmp_path).returncode == 0
    shorter = dsjob("cfg.json", cwd=tmp_path)
    assert "already finished  16 steps are done, more than the 8 of this job: nothing" in shorter.stdout, shorter.stderr
    assert "to train longer, set trainer.max_epochs=4" in shorter.stdout
    assert "continue   dsjob run run trainer.max_epochs=4" in shorter.stdout


def test_a_model_of_transformers_is_to_be_converted_for_it(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "my_model.Pretrained"})
    with (tmp_path / "my_model.py").open("a") as file:
        file.write(PRETRAINED)
    done = dsjob("cfg.json", cwd=tmp_path)
    assert "convert    dsjob convert --to hf run/checkpoints run/model" in done.stdout, done.stderr


def test_something_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    make_job(tmp_path)
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "torch.py").write_text("raise ImportError('too early')")
    done = dsjob("cfg.json", cwd=tmp_path, fresh=True, PYTHONPATH=str(fake))
    assert "too early" in done.stderr
    assert done.stdout == "starting cfg (cfg.json) on 1 rank\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trainer.max_steps", "300"], "trainer.max_steps=300"),
        (["trainer.max_steps:", "300"], "trainer.max_steps=300"),
        (["trainer.max_steps", "=", "300"], "trainer.max_steps=300"),
        (["trainer.max_steps=", "300"], "trainer.max_steps=300"),
        (["--trainer.max_steps=300"], "trainer.max_steps=300"),
        (["--trainer.max_steps", "300"], "trainer.max_steps=300"),
        (["-trainer.max_steps=300"], "trainer.max_steps=300"),
        (["--max_steps=300"], "trainer.max_steps=300"),
        (["--model.hidden", "-3"], "model.hidden=-3"),
        (["--trainer.max_steps", "trainer.seed=1"], "trainer.max_steps=VALUE"),
        (["--data.train.path=a b"], "'data.train.path=a b'"),
    ],
)
@pytest.mark.parametrize(
    "command", [[], ["run"], ["validate"], ["show"], ["plan"], ["compare-engines"]], ids=lambda c: " ".join(c)
)
def test_an_override_that_is_no_key_value_is_corrected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    words: list[str],
    meant: str,
) -> None:
    monkeypatch.chdir(make_job(tmp_path))
    assert main([*command, "cfg.json", *words]) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[1:] == [f"  write key=value: {meant}"]
    assert repr(words[0]) in told


@pytest.mark.parametrize(
    "words",
    [
        ["--params", "7B"],
        ["--steps", "5"],
        ["--format", "json"],
        ["--offload", "optimizer"],
        ["--trust", "model.Net"],
        ["--config-dir", "conf.d"],
        ["--cfg", "job", "--package", "optimizer.params"],
        ["cfg.json", "trainer.max_steps=", "trainer.seed=1"],
        ["my.module"],
        ["-m", "optimizer.params.lr=1,2"],
        ["-sc", "install=bash"],
    ],
)
def test_flags_and_files_are_left_to_the_command(words: list[str]) -> None:
    require_overrides(words)


@pytest.mark.parametrize("command", ["run", "validate", "show", "plan", "compare-engines"])
def test_flags_of_the_commands_are_no_overrides(capsys: pytest.CaptureFixture[str], command: str) -> None:
    if command == "run":
        flags = list(get_args_parser()._option_string_actions)
    else:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        flags = re.findall(r"--?[a-z][\w-]*", capsys.readouterr().out)
    assert len(flags) > 5
    for flag in flags:
        require_overrides([flag, "1"])


def test_a_file_may_be_named_like_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        require_overrides(["model.size"])
    Path("model.size").write_text("{}")
    require_overrides(["model.size"])
    require_overrides(["model.json"])  # that it is not there is for the command to say


def test_a_recipe_of_ones_own_without_a_package_line_is_explained(tmp_path: Path) -> None:
    make_job(tmp_path)
    recipe = tmp_path / "conf/recipe/mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("trainer: {max_steps: 3}\n")
    done = dsjob("show", "cfg.json", "--config-dir", "conf", "+recipe=mine", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{recipe}:1:1: error[recipe-package]: ")
    assert line.endswith("make this its first line: # @package _global_")
    recipe.write_text("# @package _global_\ntrainer: {max_steps: 3, _comment: short}\n")
    done = dsjob("show", "cfg.json", "--config-dir", "conf", "+recipe=mine", cwd=tmp_path)
    assert "max_steps: 6" in done.stdout, done.stderr


def test_a_sweep_is_suggested_with_the_folder_of_the_recipe(tmp_path: Path) -> None:
    make_job(tmp_path)
    recipe = tmp_path / "own conf/recipe/mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ntrainer: {log_every: 2}\n")
    done = dsjob("cfg.json", "trainer.max_steps=1", "--config-dir", "own conf", "+recipe=mine", cwd=tmp_path)
    assert "dsjob -m --config-dir 'own conf' +recipe=mine optimizer.params.lr=" in done.stdout, done.stderr


def test_far_more_ranks_than_cores_are_warned_of(tmp_path: Path) -> None:
    assert count_too_few_cores({"nproc": 100_000, "device": "cpu"}) > 0
    assert count_too_few_cores({"nproc": 100_000, "device": "cuda"}) == 0
    assert count_too_few_cores({"nproc": 2, "device": "cpu"}) == 0
    make_job(tmp_path, model={"_target_": "my_model.nowhere"}, trainer={"train_batch": 1024, "max_steps": 1})
    done = dsjob("cfg.json", "launch.nproc=1024", "launch.device=cpu", "output.dir=cfg.json/x", cwd=tmp_path)
    assert "warning[cores]: launch.nproc: far more ranks than the " in done.stderr


def test_remarks_are_read_over(tmp_path: Path) -> None:
    make_job(tmp_path)
    document = json.loads((tmp_path / "cfg.json").read_text())
    document["model"]["_comment"] = "a model"
    document["data"]["train"]["_comment_n"] = {"n": [1]}
    document["trainer"]["_comment"] = None
    document["optimizer"]["params"]["_comment on lr"] = 5
    text = json.dumps(document)
    (tmp_path / "remarks.json").write_text('{"_comment": 1, "_comment": {"twice": 1}, ' + text[1:])
    (tmp_path / "ds.json").write_text('{"_comment": "x", "bf16": {"enabled": false, "_comment": "y"}}')
    for command in ("validate", "show"):
        done = dsjob(command, "remarks.json", *(["deepspeed=ds.json"] if command == "show" else []), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "comment" not in done.stdout
    done = dsjob("remarks.json", "deepspeed=ds.json", "trainer.max_steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "comment" not in (tmp_path / "run/resolved.json").read_text()


TRAINER = '{"output_dir": "out", "per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 5e-5}'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["quickstart"], "quickstart is a recipe, not a command\n  run dsjob +recipe=quickstart"),
        (["cfg.yaml", "recipe=quickstart"], "a recipe is chosen with a plus: +recipe=NAME"),
        (["train.py"], "dsjob import -- python train.py"),
        (["trainer.json"], "not a job document but Trainer arguments; convert it to a job"),
        (
            ["run", "run/checkpoints"],
            "run/checkpoints is not a run folder: there is no resolved.json in it\n  dsjob run run",
        ),
        (["validate", "run"], "this is a folder, not a job document; name a file: dsjob validate run/resolved.json"),
        (["cfg.yaml", "model._target_=my_model:Net"], '"my_model:Net" is not a dotted path; write my_model.Net'),
        (["cfg.yaml", "data=mine.Data"], 'write {"train": {"_target_": "mine.Data"}}'),
        (["cfg.yaml", "trainer.max_steps=1,2"], "to run once per value, add -m"),
        (["plan", "cfg.yaml", "--device-memory", "80"], "'80' is not an amount of memory: write 80GiB"),
    ],
)
def test_a_plausible_mistake_has_a_next_step(tmp_path: Path, arguments: list[str], told: str) -> None:
    make_job(tmp_path)
    (tmp_path / "cfg.json").rename(tmp_path / "cfg.yaml")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/resolved.json").write_text("{}")
    (tmp_path / "train.py").touch()
    (tmp_path / "trainer.json").write_text(TRAINER)
    done = dsjob(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
