"""TrainingArguments that contradict the DeepSpeed config are told with the places of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import dsjob

pytest.importorskip("transformers")

PROGRAM = """
import json, torch
from transformers import HfArgumentParser, TrainingArguments

def finalize(args):  # as Trainer.train does
    args.hf_deepspeed_config.trainer_config_finalize(args, torch.nn.Linear(1, 1), 10)

common = dict(output_dir="out", use_cpu=True, report_to=[], adam_beta1=0.8, adam_beta2=0.99)
args = TrainingArguments(weight_decay=0.1, deepspeed=json.load(open("ds.json")), **common)
try:
    finalize(args)
except ValueError as error:
    print(error)
class Arguments(TrainingArguments):
    pass

[args] = HfArgumentParser(Arguments).parse_args_into_dataclasses(args_file_flag="--args")
finalize(args)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.99], "weight_decay": 0}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 5}},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": False},
}
TO_DO = 'write "auto" here to use the argument, or make both equal'


def test_both_places_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG, indent=1))
    words = (
        "--output_dir out --use_cpu --deepspeed ds.json --learning_rate 1e-4 --adam_beta2=0.98 --weight-decay 0 --bf16"
    )
    done = dsjob("exec", "--no_local_rank", "train.py", *words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    default = "the default of Arguments"
    for column, key, told in [
        ("3:2", "gradient_clipping", f"0.5, but max_grad_norm=1.0 ({default})"),
        ("7:4", "optimizer.params.lr", "0.001, but learning_rate=0.0001 (--learning_rate 1e-4 on the command line)"),
        (
            "8:4",
            "optimizer.params.betas",
            "[0.9, 0.99], but adam_beta1, adam_beta2=[0.9, 0.98] (--adam_beta2=0.98 on the command line)",
        ),
        (
            "18:4",
            "scheduler.params.total_num_steps",
            f"20, but num_training_steps=10 (from max_steps=-1: {default}, num_train_epochs=3.0: {default})",
        ),
        ("19:4", "scheduler.params.warmup_num_steps", f"5, but warmup_steps=1 (from warmup_steps=0: {default})"),
        ("26:3", "bf16.enabled", "False, but bf16 or bf16_full_eval=True (--bf16 on the command line)"),
    ]:
        assert f"ds.json:{column}: error[contradiction]: {key}: {told}; {TO_DO}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert "train.py:9: error[contradiction]: optimizer.params.betas: [0.9, 0.99], but adam_beta1, " in done.stdout
    assert "adam_beta2=[0.8, 0.99] (train.py:9)" in done.stdout


UNUSED = """
import torch
from transformers import HfArgumentParser, TrainingArguments

[args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.hf_deepspeed_config.trainer_config_finalize(args, torch.nn.Linear(1, 1), 10)
print("trains")
"""
BARE = {
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"eps": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 1},
}


def test_torch_adam_has_the_default_weight_decay_of_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNUSED)
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    (tmp_path / "ds.json").write_text(json.dumps({**BARE, "optimizer": optimizer}, indent=1))
    words = "--output_dir out --use_cpu --deepspeed ds.json --max_grad_norm 1.0 --weight_decay"
    done = dsjob("exec", "--no_local_rank", "train.py", *words.split(), "0.01", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
    done = dsjob("exec", "--no_local_rank", "train.py", *words.split(), "0.1", cwd=tmp_path)
    assert "optimizer.params.weight_decay: is missing, so its default of 0.01 would be used" in done.stderr


@pytest.mark.parametrize("given", [True, False])
def test_an_argument_whose_key_is_missing_is_told_only_if_somebody_gave_it(tmp_path: Path, given: bool) -> None:
    (tmp_path / "train.py").write_text(UNUSED)
    (tmp_path / "ds.json").write_text(json.dumps(BARE, indent=1))
    words = "--output_dir out --use_cpu --deepspeed ds.json --adam_epsilon 1e-6 --max_grad_norm 1.0"
    more = " --learning_rate 1e-4 --weight_decay=0.1 --warmup_steps 5 --adam_beta2 0.98"
    done = dsjob("exec", "--no_local_rank", "train.py", *(words + more * given).split(), cwd=tmp_path)
    if not given:
        assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
        return
    assert done.returncode == 2, done.stderr
    for place, key, default, told in [
        ("5:3", "optimizer.params.lr", "0.001", "learning_rate=0.0001 (--learning_rate 1e-4 on the command line)"),
        ("5:3", "optimizer.params.betas", "[0.9, 0.999]", "adam_beta2=0.98 (--adam_beta2 0.98 on the command line)"),
        ("5:3", "optimizer.params.weight_decay", "0", "weight_decay=0.1 (--weight_decay=0.1 on the command line)"),
        (
            "11:3",
            "scheduler.params.warmup_num_steps",
            "1000",
            "warmup_steps=5.0 (--warmup_steps 5 on the command line)",
        ),
    ]:
        message = f"is missing, so its default of {default} would be used, but the program has {told}"
        hint = f'add "{key.rpartition(".")[2]}": "auto" to use the argument, or leave the argument out'
        assert f"ds.json:{place}: error[contradiction]: {key}: {message}; {hint}\n" in done.stderr
    assert "gradient_clipping" not in done.stderr  # DeepSpeed's default is what the argument says
    assert "params.eps" not in done.stderr


BATCHES = """
import json, sys
from transformers import TrainingArguments

numbers = dict(per_device_train_batch_size=4, gradient_accumulation_steps=3)
args = TrainingArguments("out", use_cpu=True, deepspeed=json.loads(sys.argv[1]), **numbers)
config = args.hf_deepspeed_config.config
names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
print([config.get(name) for name in names])
"""


@pytest.mark.parametrize(
    ("given", "sizes"),
    [({}, [None, 4, 3]), ({"train_batch_size": 12}, [12, None, 3]), ({"train_batch_size": "auto"}, [12, None, 3])],
)
def test_batch_sizes_that_the_config_lacks_are_those_of_the_arguments(
    tmp_path: Path, given: dict[str, object], sizes: list[int | None]
) -> None:
    (tmp_path / "train.py").write_text(BATCHES)
    config = {"zero_optimization": {"stage": 1}, **given}
    done = dsjob("exec", "--no_local_rank", "train.py", json.dumps(config), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{sizes}\n"), done.stderr


SIZES = """
import torch
from transformers import PretrainedConfig, TrainingArguments

zero = {"stage": 3, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
for name, config in ("sized", PretrainedConfig(hidden_size=10)), ("unsized", None):
    args = TrainingArguments("out", use_cpu=True, deepspeed={"zero_optimization": zero})
    model = torch.nn.Linear(1, 1)
    model.config = config
    args.hf_deepspeed_config.trainer_config_finalize(args, model, 10)
    print(name, *list(args.hf_deepspeed_config.config["zero_optimization"].values())[1:])
"""


def test_sizes_of_0_are_calculated_from_the_model_where_that_is_possible(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIZES)
    done = dsjob("exec", "--no_local_rank", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "sized 100 90 100\nunsized 0 0 0\n"), done.stderr


FROM_A_FILE = """
import torch
from transformers import TrainingArguments

args = TrainingArguments("out", use_cpu=True, deepspeed="ds.json", weight_decay=0.3)
args.hf_deepspeed_config.trainer_config_finalize(args, torch.nn.Linear(1, 1), 10)
"""


@pytest.mark.parametrize(("rows", "place"), [(1, "arguments.json:1:2"), (20_000, "train.py:5")])
def test_files_that_the_command_line_names_are_searched_unless_they_are_large_like_training_data(
    tmp_path: Path, rows: int, place: str
) -> None:
    (tmp_path / "train.py").write_text(FROM_A_FILE)
    (tmp_path / "ds.json").write_text(json.dumps(BARE))
    (tmp_path / "arguments.json").write_text(json.dumps({"weight_decay": 0.3, "rows": ["text"] * rows}))
    done = dsjob("exec", "--no_local_rank", "train.py", "arguments.json", cwd=tmp_path)
    assert done.returncode == 2
    assert f"the program has weight_decay=0.3 ({place})" in done.stderr


def test_a_config_file_that_does_not_exist_is_told_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from transformers import TrainingArguments\n\nTrainingArguments('out', use_cpu=True, deepspeed='dz.json')\n"
    )
    done = dsjob("exec", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "dsjob: error: train.py:3: the DeepSpeed config dz.json does not exist" in done.stderr
    assert "Traceback" not in done.stderr
