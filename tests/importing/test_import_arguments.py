"""The Trainer's arguments: every row of the table says something in the job or in a note."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from imports import get, import_command, import_texts, messages, resolve_imported

from dsjob.contract.trainer_arguments import ARGUMENTS, SCRIPT_ARGUMENTS
from dsjob.errors import DocumentError
from dsjob.importing.methods import OPTIMIZERS
from dsjob.importing.schedules import SCHEDULES

BASE = "python train.py --output_dir out --max_steps 100"
# What to give where a value of the default's kind would say nothing.
SAMPLES = {
    "torch_compile_mode": "max-autotune",
    "num_train_epochs": "5",
    "deepspeed": '{"zero_optimization": {"stage": 2}}',
    "deepspeed_config": '{"zero_optimization": {"stage": 2}}',
    "sharded_ddp": "simple",
    "fsdp": "full_shard",
    "fsdp_config": '{"reshard_after_forward": false}',
    "optim": "sgd",
    "optim_args": "amsgrad=true",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
    "warmup_steps": "10",
    "warmup_ratio": "0.1",
    "fp16_backend": "apex",
    "half_precision_backend": "apex",
    "fp16_opt_level": "O2",
    "ddp_backend": "gloo",
    "xpu_backend": "ccl",
    "logging_strategy": "epoch",
    "eval_strategy": "steps",
    "evaluation_strategy": "steps",
    "eval_steps": "10",
    "save_strategy": "no",
    "greater_is_better": "True",
    "report_to": "wandb",
    "debug": "underflow_overflow",
    "save_total_limit": "3",
    "max_grad_norm": "0.5",
    "adam_beta1": "0.8",
    "adam_beta2": "0.95",
    "max_train_samples": "64",
    "max_eval_samples": "64",
    "max_val_samples": "64",
    "max_predict_samples": "64",
    "max_test_samples": "64",
    "max_source_length": "64",
    "max_target_length": "64",
    "per_gpu_train_batch_size": "3",
    "per_gpu_eval_batch_size": "3",
    "_n_gpu": "2",
    "do_train": "True",
}
# What an argument needs beside it to mean anything.
BESIDE = {
    "fp16_backend": "--fp16",
    "half_precision_backend": "--fp16",
    "fp16_opt_level": "--fp16 --fp16_backend apex",
    "lr_scheduler_kwargs": "--lr_scheduler_type cosine_with_min_lr",
    "eval_steps": "--eval_strategy steps",
    "greater_is_better": "--metric_for_best_model loss",
    "logging_dir": "--report_to tensorboard",
    "do_train": "--do_eval",
    "text_column": "--model_name_or_path t5-small --train_file a.csv",
    "summary_column": "--model_name_or_path t5-small --train_file a.csv",
    "model_revision": "--model_name_or_path bert-base-cased",
    "attn_implementation": "--model_name_or_path gpt2",
}
SILENT = {"local_rank"}


def sample(name: str) -> str:
    default = {**ARGUMENTS, **SCRIPT_ARGUMENTS}[name].default
    if name in SAMPLES:
        return SAMPLES[name]
    if isinstance(default, bool):
        return str(not default)
    if isinstance(default, (int, float)):
        return str(default + 1)
    return "something"


@pytest.mark.parametrize("name", [*ARGUMENTS, *SCRIPT_ARGUMENTS])
def test_every_argument_changes_the_job_or_is_in_a_note(name: str) -> None:
    script = "run_clm.py" if name in ("model_revision", "attn_implementation") else "train.py"
    base = f"{BASE} {BESIDE.get(name, '')}".replace("train.py", script)
    without, with_it = import_command(base), import_command(f"{base} --{name} '{sample(name)}'")
    new = {str(note) for note in with_it.notes} - {str(note) for note in without.notes}
    told = [note for note in new if f"--{name}" in note]
    carried = with_it.document != without.document
    assert bool(carried or told) != (name in SILENT), new
    assert not any(note.startswith("unknown") for note in new)
    row = {**ARGUMENTS, **SCRIPT_ARGUMENTS}[name]
    if carried and row.keys:
        changed = [key for key in row.keys if get(with_it.document, key) != get(without.document, key)]
        assert changed, (row.keys, with_it.document)
    resolve_imported(with_it)


def test_every_argument_of_the_installed_trainer_is_in_the_table() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {field.name: field for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert set(fields) - set(ARGUMENTS) == set()
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING and field.default is not None:
            assert ARGUMENTS[name].default == getattr(field.default, "value", field.default), name


def test_every_optimizer_and_schedule_of_the_installed_trainer_gives_a_job() -> None:
    pytest.importorskip("transformers")
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    for kind in SchedulerType:
        needed = {"cosine_with_min_lr": '{"min_lr_rate": 0.1}', "warmup_stable_decay": '{"num_decay_steps": 5}'}
        kwargs = f"--lr_scheduler_kwargs '{needed[kind.value]}'" if kind.value in needed else ""
        imported = import_command(f"{BASE} --lr_scheduler_type {kind.value} --warmup_steps 10 {kwargs}")
        resolve_imported(imported)
        assert imported.document["scheduler"].get("type") in (kind.value, None, "constant")
        if kind.value not in SCHEDULES:
            assert "has no equivalent" in messages(imported, "left out"), kind
    for optimizer in OptimizerNames:
        imported = import_command(f"{BASE} --optim {optimizer.value}")
        resolve_imported(imported)
        if optimizer.value not in OPTIMIZERS:
            assert "replaced by AdamW" in messages(imported, "changed"), optimizer


@pytest.mark.parametrize("name", sorted({v for v in SCHEDULES.values() if "." in v} | {"transformers.Adafactor"}))
def test_what_stands_for_a_schedule_is_in_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert callable(getattr(transformers, name.split(".")[1]))


# command -> values at paths
COMMANDS: list[tuple[str, dict[str, Any]]] = [
    (
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 3e-5 --seed 7",
        {
            "trainer.micro_batch": 4,
            "trainer.grad_accum": 2,
            "trainer.seed": 7,
            "trainer.max_steps": 100,
            "trainer.max_epochs": None,
            "optimizer.type": "AdamW",
            "optimizer.params.lr": 3e-5,
            "scheduler": {"type": "linear"},
        },
    ),
    (
        "",
        {
            "optimizer.params.lr": 5e-5,
            "trainer.micro_batch": 8,
            "trainer.log_every": 500,
            "checkpoint.every": 500,
            "checkpoint.keep": 0,
        },
    ),
    (
        "--adam_beta1 0.8 --adam_epsilon 1e-6 --weight_decay 0.1",
        {"optimizer.params.betas": [0.8, 0.999], "optimizer.params.eps": 1e-6, "optimizer.params.weight_decay": 0.1},
    ),
    (
        "--optim sgd --optim_args momentum=0.9,nesterov=True",
        {
            "optimizer.type": "SGD",
            "optimizer.params.momentum": 0.9,
            "optimizer.params.nesterov": True,
            "optimizer.params.betas": None,
        },
    ),
    (
        "--adafactor",
        {
            "optimizer._target_": "transformers.Adafactor",
            "optimizer.relative_step": False,
            "optimizer.lr": 5e-5,
            "optimizer.type": None,
        },
    ),
    ("--lr_scheduler_type constant", {"scheduler": {"type": "constant"}}),
    (
        "--lr_scheduler_type constant_with_warmup --warmup_steps 20",
        {"scheduler": {"type": "constant_with_warmup", "params": {"num_warmup_steps": 20}}},
    ),
    (
        "--lr_scheduler_type cosine --warmup_ratio 0.05",
        {"scheduler": {"type": "cosine", "params": {"num_warmup_steps": 5}}},
    ),
    (
        "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": 5e-6}'",
        {"scheduler": {"type": "cosine_with_min_lr", "params": {"min_lr": 5e-6}}},
    ),
    (
        (
            "--lr_scheduler_type cosine_warmup_with_min_lr "
            """--lr_scheduler_kwargs '{"min_lr_rate": 0.2, "warmup_lr_rate": 0.5}'"""
        ),
        {
            "scheduler": {
                "_target_": SCHEDULES["cosine_warmup_with_min_lr"],
                "num_warmup_steps": 0,
                "num_training_steps": 100,
                "min_lr_rate": 0.2,
                "warmup_lr_rate": 0.5,
            }
        },
    ),
    ("--lr_scheduler_type cosine_with_restarts", {"scheduler": {"type": "cosine_with_restarts"}}),
    (
        "--lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs '{\"num_cycles\": 3}'",
        {"scheduler": {"type": "cosine_with_restarts", "params": {"num_cycles": 3}}},
    ),
    (
        "--lr_scheduler_type polynomial --warmup_steps 5",
        {"scheduler": {"type": "polynomial", "params": {"num_warmup_steps": 5}}},
    ),
    (
        "--lr_scheduler_type inverse_sqrt",
        {"scheduler": {"type": "inverse_sqrt"}},
    ),
    ("--lr_scheduler_type reduce_lr_on_plateau", {"scheduler": {"type": "constant"}}),
    ("--bf16", {"bf16.enabled": True, "fp16": None}),
    ("--fp16 --fp16_backend amp", {"fp16.enabled": True, "amp": None}),
    ("--fp16 --fp16_backend apex --fp16_opt_level 01", {"amp": {"enabled": True, "opt_level": "O1"}, "fp16": None}),
    ("--sharded_ddp simple", {"zero_optimization": {"stage": 2}}),
    ("--sharded_ddp zero_dp_2", {"zero_optimization": {"stage": 2}}),
    (
        "--sharded_ddp 'zero_dp_2 cpu_offload'",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    (
        "--sharded_ddp 'zero_dp_3 auto_wrap cpu_offload'",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    ),
    (
        "--sharded_ddp zero_dp_3 auto_wrap offload",
        {"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "cpu"},
    ),
    (
        "--fsdp 'full_shard auto_wrap offload'",
        {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"},
    ),
    ("--fsdp shard_grad_op", {"zero_optimization.stage": 2}),
    ("--fsdp no_shard", {"zero_optimization": None}),
    (
        '--fsdp True --fsdp_config \'{"reshard_after_forward": false, "transformer_layer_cls_to_wrap": "T5Block"}\'',
        {"zero_optimization.stage": 2},
    ),
    (
        "--eval_strategy steps --eval_steps 50 --eval_on_start",
        {"trainer.eval_every": 50, "trainer.eval_at_start": True, "data.eval._target_": "my_module.build_eval_data"},
    ),
    ("--evaluation_strategy steps --logging_steps 25", {"trainer.eval_every": 25, "trainer.log_every": 25}),
    (
        "--do_eval",
        {"trainer.eval_every": None, "data.eval._target_": "my_module.build_eval_data", "tasks": ["eval"]},
    ),
    ("--do_train --do_eval", {"data.eval._target_": "my_module.build_eval_data", "tasks": None}),
    (
        "--do_train --do_predict --test_file a.csv --per_device_eval_batch_size 16",
        {"tasks": ["train", "predict"], "data.test.path": "a.csv", "trainer.eval_micro_batch": 16},
    ),
    ("--do_eval --do_predict", {"tasks": ["eval", "predict"], "data.test._target_": "my_module.build_test_data"}),
    ("--do_eval --eval_strategy steps", {"tasks": None, "trainer.eval_every": 500}),
    (
        "--load_best_model_at_end --eval_strategy steps --save_total_limit 1",
        {
            "checkpoint.load_best_at_end": True,
            "checkpoint.best": {"metric": "eval/loss", "mode": "min"},
            "checkpoint.keep": 1,
            "metrics": None,
        },
    ),
    (
        "--metric_for_best_model eval_accuracy --save_strategy best --eval_strategy steps",
        {
            "checkpoint.best": {"metric": "eval/accuracy", "mode": "max"},
            "checkpoint.every": 0,
            "metrics.accuracy._target_": "my_module.accuracy",
        },
    ),
    (
        "--metric_for_best_model wer --greater_is_better False --eval_strategy steps",
        {"checkpoint.best": {"metric": "eval/wer", "mode": "min"}},
    ),
    (
        "--report_to tensorboard wandb --logging_dir logs",
        {"monitor": {"tensorboard": {"enabled": True, "output_path": "logs"}, "wandb": {"enabled": True}}},
    ),
    ("--debug underflow_overflow", {"callbacks": {"nan_guard": {"_target_": "dsjob.callbacks.NanGuard"}}}),
    ("--save_steps 0.1 --save_total_limit 3", {"checkpoint.every": 10, "checkpoint.keep": 3}),
    ("--save_strategy no", {"checkpoint.every": 0}),
    ("--overwrite_output_dir", {"checkpoint.resume": "never", "output.dir": "out"}),
    ("--resume_from_checkpoint True", {"checkpoint.resume": "required"}),
    ("--run_name 'my run/3'", {"name": "my-run-3"}),
    (
        "--no_cuda --ddp_backend gloo --ddp_timeout 7200",
        {"launch": {"device": "cpu", "backend": "gloo", "timeout": 7200}},
    ),
    ("--dataloader_num_workers 4 --dataloader_pin_memory False", {"data.num_workers": 4, "data.pin_memory": False}),
    ("--no_dataloader_pin_memory", {"data.pin_memory": False}),
    ("--fp16 yes --bf16 no", {"fp16.enabled": True, "bf16.enabled": False}),
]


@pytest.mark.parametrize(("arguments", "wanted"), COMMANDS)
def test_arguments_in_the_job(arguments: str, wanted: dict[str, Any]) -> None:
    imported = import_command(f"{BASE} {arguments}")
    got = {path: get(imported.document, path) for path in wanted}
    if "zero_optimization" in wanted and wanted["zero_optimization"] is None:
        got["zero_optimization"] = got["zero_optimization"] if got["zero_optimization"] != {"stage": 0} else None
    assert got == wanted
    resolve_imported(imported)


def test_a_share_of_warm_up_counts_the_samples_of_all_epochs() -> None:
    imported = import_command(
        "torchrun --nproc_per_node 2 train.py --output_dir o --num_train_epochs 3 --max_train_samples 500 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --warmup_ratio 0.1"
    )
    assert imported.document["scheduler"]["params"] == {"num_warmup_steps": 10}  # of 94: 1500 samples, 16 a step
    assert imported.document["trainer"]["max_epochs"] == 3


def test_an_unknown_number_of_steps_has_to_be_filled_in() -> None:
    imported = import_command("torchrun --nproc_per_node 2 train.py --output_dir o --warmup_ratio 0.1")
    assert imported.document["scheduler"]["params"] == {"num_warmup_steps": "fill in"}
    assert "num_warmup_steps: --warmup_ratio=0.1 is a share of all steps" in messages(imported, "fill in")
    imported.document["scheduler"]["params"]["num_warmup_steps"] = 13
    resolve_imported(imported)


def test_cadences_by_epoch() -> None:
    imported = import_command(f"{BASE} --eval_strategy epoch --save_strategy epoch --logging_strategy epoch")
    assert [
        get(imported.document, path) for path in ("trainer.eval_every", "checkpoint.every", "trainer.log_every")
    ] == ["1ep"] * 3
    resolve_imported(imported)


def test_a_dump_of_all_arguments_tells_only_what_was_set(tmp_path: Path) -> None:
    dump = {name: row.default for name, row in ARGUMENTS.items()}
    dump.update(output_dir="out", max_steps=50, bf16=True, hub_token="hf_abc", report_to=["tensorboard"])
    imported = import_texts(tmp_path, {"args.json": dump})
    left_out = messages(imported, "left out").splitlines()
    assert len(left_out) == 1
    assert "hf_abc" not in messages(imported, "left out")
    assert imported.document["bf16"] == {"enabled": True}
    resolve_imported(imported)


def test_a_short_file_of_arguments_names_its_lines(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "model_name_or_path": "gpt2",
            "output_dir": "o",
            "max_steps": 5,
            "label_smoothing_factor": 0.1,
            "label_names": ["labels"],
            "neftune_noise_alpha": 5,
            "lerning_rate": 1,
        },
        indent=1,
    )
    imported = import_texts(tmp_path, {"args.json": text})
    assert "args.json:9:2: neftune_noise_alpha=5: results will differ" in messages(imported, "left out")
    assert (imported.document["label_smoothing"], imported.document["targets"]) == (0.1, ["labels"])
    assert 'args.json:10:2: lerning_rate=1: did you mean "learning_rate"?' in messages(imported, "unknown")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--warmup_steps many", "--warmup_steps=many: must be a number"),
        ("--fp16 perhaps", "--fp16=perhaps: must be true or false"),
        ("--max_train_samples few", "must be a number"),
        ("--save_steps x", "--save_steps=x: must be a number"),
        ("--per_device_train_batch_size 0.5", "must be an integer"),
        ("--learning_rate fast", "--learning_rate=fast: must be a number"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        import_command(f"{BASE} {arguments}")
    assert words in str(caught.value)
    assert "command line" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "section", "said"),
    [
        ("--gradient_checkpointing", "activation_checkpointing", {"mode": "full"}),
        ("--activation_checkpointing true", "activation_checkpointing", {"mode": "full"}),
        ("--gradient_checkpointing false", "activation_checkpointing", None),
        ("--torch_compile", "compile", {"enabled": True}),
        ("--torch_compile_mode max-autotune", "compile", {"enabled": True, "mode": "max-autotune"}),
        ("--torchdynamo aot_eager", "compile", {"enabled": True, "backend": "aot_eager"}),
        ("--torch_compile_backend eager", "compile", {"enabled": True, "backend": "eager"}),
    ],
)
def test_what_blocks_are_to_do_is_carried(arguments: str, section: str, said: Any) -> None:
    assert import_command(f"{BASE} {arguments}").document.get(section) == said


@pytest.mark.parametrize(("arguments", "said"), [("", None), ("--tf32", "high"), ("--tf32 false", "highest")])
def test_tf32_is_the_precision_of_matrix_products(arguments: str, said: str | None) -> None:
    assert import_command(f"{BASE} {arguments}").document["trainer"].get("matmul_precision") == said


def test_what_cannot_be_carried_says_what_to_do() -> None:
    imported = import_command(f"{BASE} --full_determinism True --neftune_noise_alpha 5")
    notes = messages(imported, "left out")
    assert "--full_determinism=true" in notes
    assert "results will differ" in notes


def test_a_dump_of_transformers_4_does_not_override_a_deepspeed_file(tmp_path: Path) -> None:
    """Its defaults were others, and some arguments are written out that nobody gave."""
    dump = {
        "output_dir": "out",
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "learning_rate": 5e-05,
        "bf16": False,
        "num_train_epochs": 3.0,
        "max_steps": -1,
        "fsdp": [],
        "fsdp_config": {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
        "accelerator_config": {
            "split_batches": False,
            "dispatch_batches": None,
            "even_batches": True,
            "use_seedable_sampler": True,
            "non_blocking": False,
            "gradient_accumulation_kwargs": None,
        },
        "hub_token": "<HUB_TOKEN>",
        "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>",
        "include_num_input_tokens_seen": False,
        "local_rank": 0,
        "past_index": -1,
        "deepspeed": None,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    imported = import_texts(tmp_path, {"args.json": dump, "ds.json": config})
    for section in ("bf16", "optimizer", "scheduler"):
        assert imported.document[section] == config[section]
    assert messages(imported, "left out") == ""
    assert imported.document["trainer"]["max_epochs"] == 3
    assert "optimizer.params.lr=0.1 (" in messages(imported, "conflict")
