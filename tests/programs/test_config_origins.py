"""The errors and warnings about a program's DeepSpeed config have the place that the program's author can change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob

SOUND = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}


def execute(folder: Path, program: str, *words: str, config: Any = None) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    (folder / "ds.json").write_text(json.dumps(config or SOUND, indent=1))
    return dsjob("exec", "--run-dir", "run", *words, "train.py", cwd=folder)


DIRECT = """
import torch, deepspeed
def build(config):
    return deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
build(CONFIG)
"""


def test_a_file_that_initialize_reads_is_blamed_with_line_and_column(tmp_path: Path) -> None:
    done = execute(tmp_path, DIRECT.replace("CONFIG", "'ds.json'"), config={**SOUND, "stepz": 1})
    assert done.returncode == 2
    assert "ds.json:6:2: error[unknown-key]: stepz: unknown key; " in done.stderr


def test_a_dict_is_blamed_at_the_line_that_passes_it_on(tmp_path: Path) -> None:
    config = '{"train_batch_size": 2, "zero_optimization": {"stage": 4}, "stepz": 1}'
    done = execute(tmp_path, DIRECT.replace("CONFIG", config))
    assert done.returncode == 2
    assert "train.py:4: error[unknown-key]: stepz: unknown key; " in done.stderr
    assert "train.py:4: error[enum]: zero_optimization.stage: " in done.stderr
    done = execute(tmp_path, DIRECT.replace("CONFIG", config), "--lenient")
    assert done.returncode == 2
    assert "warning[unknown-key]" not in done.stderr.partition("error[")[2]
    assert "train.py:4: error[enum]: zero_optimization.stage: " in done.stderr


def test_keys_without_effect_are_told_on_one_line_without_defaults(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 1000, "sub_group_size": 1000, "contiguous_gradients": True}
    config = {"train_batch_size": 2, "zero_optimization": zero, "wall_clock_breakdown": False}
    done = execute(tmp_path, DIRECT.replace("CONFIG", "'ds.json'"), config=config)
    _, told = done.stderr.splitlines()
    names = "zero_optimization.reduce_bucket_size, zero_optimization.sub_group_size"
    assert told == f"dsjob: ds.json: these keys have no effect in dsjob: {names} (why: dsjob validate ds.json)"
    done = execute(tmp_path, DIRECT.replace("CONFIG", str(config)))
    assert f"dsjob: train.py:4: these keys have no effect in dsjob: {names}\n" in done.stderr


REPLACED = """
import torch, deepspeed
net = torch.nn.Linear(2, 1)
make = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
engine, optimizer, _, _ = deepspeed.initialize(
    model=net, config="ds.json", optimizer=torch.optim.SGD(net.parameters()), lr_scheduler=make)
print(type(optimizer).__name__)
"""


def test_sections_that_the_programs_own_objects_replace_are_told(tmp_path: Path) -> None:
    sections = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    done = execute(tmp_path, REPLACED, config={**SOUND, **sections})
    assert (done.returncode, done.stdout) == (0, "SGD\n"), done.stderr
    told = "has no effect: the program passes {}, which replaces it; remove one of the two"
    assert f"dsjob: ds.json:6:2: warning[replaced]: optimizer: {told.format('its own SGD')}\n" in done.stderr
    assert f"dsjob: ds.json:9:2: warning[replaced]: scheduler: {told.format('a function')}\n" in done.stderr


ACCELERATE = """
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(PLUGIN))
model = torch.nn.Linear(4, 1)
model.config = type("Config", (), {"hidden_size": 4})  # from which accelerate chooses bucket sizes
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for [x] in loader:
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
print(optimizer.step_was_skipped)
"""
ZERO = {"stage": 2, "allgather_partitions": True, "reduce_bucket_size": "auto"}
FILE = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": ZERO}


@pytest.mark.parametrize("plugin", ["hf_ds_config='ds.json'", "zero_stage=2"])
def test_an_accelerate_program_prints_nothing_of_dsjob(tmp_path: Path, plugin: str) -> None:
    pytest.importorskip("accelerate")
    done = execute(tmp_path, ACCELERATE.replace("PLUGIN", plugin), config=FILE)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_file_that_accelerate_reads_is_checked_at_once(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    wrong = {**FILE, "zero_optimization": {"stage": 2, "overlap_com": True, "reduce_bucket_size": "large"}}
    program = ACCELERATE.replace("PLUGIN", "hf_ds_config='ds.json'")
    done = execute(tmp_path, program, config=wrong)
    assert done.returncode == 2
    unknown = "ds.json:6:3: error[unknown-key]: zero_optimization.overlap_com: unknown key"
    assert f'{unknown}; did you mean "overlap_comm"?' in done.stderr
    assert "ds.json:7:3: error[type]: zero_optimization.reduce_bucket_size: " in done.stderr
    done = execute(tmp_path, program.replace("'ds.json'", "{'zero_optimization': {'stage': 2}, 'stepz': 1}"))
    assert "train.py:6: error[unknown-key]: stepz: unknown key; " in done.stderr


@pytest.mark.parametrize("given", ["file", "dict"])
def test_a_misspelt_key_with_the_value_auto_is_told_before_accelerate_looks_for_its_value(
    tmp_path: Path, given: str
) -> None:
    pytest.importorskip("accelerate")
    wrong = {**FILE, "zero_optimization": {"stage": 2, "reduce_buket_size": "auto"}}
    config, place = ("'ds.json'", "ds.json:6:3") if given == "file" else (str(wrong), "train.py:6")
    done = execute(tmp_path, ACCELERATE.replace("PLUGIN", f"hf_ds_config={config}"), config=wrong)
    assert done.returncode == 2
    unknown = "error[unknown-key]: zero_optimization.reduce_buket_size: unknown key"
    assert done.stderr.splitlines()[1:] == [f'{place}: {unknown}; did you mean "reduce_bucket_size"?']


@pytest.mark.parametrize("given", ["file", "dict"])
def test_leniently_a_misspelt_key_with_the_value_auto_is_left_out(tmp_path: Path, given: str) -> None:
    pytest.importorskip("accelerate")
    wrong = {**FILE, "stepz": 1, "zero_optimization": {"stage": 2, "reduce_buket_size": "auto"}}
    config, places = (
        ("'ds.json'", ("ds.json:8:2", "ds.json:6:3")) if given == "file" else (str(wrong), ("train.py:6",) * 2)
    )
    done = execute(tmp_path, ACCELERATE.replace("PLUGIN", f"hf_ds_config={config}"), "--lenient", config=wrong)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    expected = zip(places, ("stepz", "zero_optimization.reduce_buket_size"), strict=True)
    told = [line.partition("left out")[0] + "left out" for line in done.stderr.splitlines()[1:]]
    assert sorted(told) == sorted(
        f"dsjob: {place}: warning[unknown-key]: {key}: unknown key, left out" for place, key in expected
    )


def test_a_config_that_is_not_json_is_told_with_the_line(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "ds.yaml").write_text("zero_optimization: {stage: 2}\n")
    done = execute(tmp_path, ACCELERATE.replace("PLUGIN", "hf_ds_config='ds.yaml'"))
    assert done.returncode == 2
    assert "dsjob: error: train.py:6: the DeepSpeed config ds.yaml is not JSON, which accelerate reads\n" in done.stderr
    assert "Traceback" not in done.stderr


AGAIN = """
import torch, deepspeed
from accelerate.utils.deepspeed import HfDeepSpeedConfig

first = HfDeepSpeedConfig("ds.json")
second = HfDeepSpeedConfig(first.config)  # as Trainer does to search for a batch size
second.config["reduce_buket_size"] = first.config["reduce_bucket_size"] = 1
deepspeed.initialize(model=torch.nn.Linear(4, 1), config=CONFIG)
"""


def test_a_config_that_is_read_from_another_one_has_its_place(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    done = execute(tmp_path, AGAIN.replace("CONFIG", "second.config"))
    assert "ds.json:1:1: error[unknown-key]: reduce_buket_size: unknown key; " in done.stderr


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("", "accelerate takes each of the 2 ranks for a program of its own"),
        (", cpu=True", "with cpu=True, accelerate ignores the DeepSpeedPlugin"),
    ],
)
def test_an_accelerator_that_does_not_join_the_ranks_is_told_the_backend_to_name(
    tmp_path: Path, argument: str, expected: str
) -> None:
    pytest.importorskip("accelerate")
    made = ACCELERATE.replace("PLUGIN)", f"zero_stage=2){argument}")
    done = execute(tmp_path, made, "--num_gpus", "2")
    assert done.returncode == 2
    assert f"train.py:6: {expected}" in done.stderr  # after "rank 0: " if the other one is late
    assert 'InitProcessGroupKwargs(backend="gloo")' in done.stderr
    assert "Traceback" not in done.stderr


TRAINER = """
import torch
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", report_to=[], ddp_backend="gloo", deepspeed={"zero_optimization": {"stage": 2}})
Trainer(torch.nn.Linear(2, 1), args)
"""


def test_a_trainer_that_does_not_join_the_ranks_is_told_its_own_argument(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = execute(tmp_path, TRAINER, "--num_gpus", "2")
    assert done.returncode == 2
    assert "train.py:6: accelerate takes each of the 2 ranks for a program of its own" in done.stderr
    assert "\n  without GPUs, set use_cpu=True in TrainingArguments (--use_cpu)\n" in done.stderr
    assert "InitProcessGroupKwargs" not in done.stderr


def test_a_precision_that_contradicts_the_file_is_told_with_its_place(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    program = ACCELERATE.replace("PLUGIN)", "hf_ds_config='ds.json'), mixed_precision='bf16'")
    done = execute(tmp_path, program, config={**FILE, "fp16": {"enabled": True}})
    assert done.returncode == 2
    assert "ds.json:10:3: error[contradiction]: fp16.enabled: true, but the program asks for bf16; make" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_for_deepspeed_itself_is_not_judged(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "deepspeed.py").touch()
    (tmp_path / "ds.json").write_text('{"stepz": 1}')
    (tmp_path / "train.py").write_text(
        "from accelerate.utils.deepspeed import HfDeepSpeedConfig\nprint(HfDeepSpeedConfig('ds.json').config)\n"
    )
    words = ("exec", "--engine", "deepspeed", "train.py")
    done = dsjob(*words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "{'stepz': 1}\n"), done.stderr
