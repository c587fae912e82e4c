"""DeepSpeed configs as people have them: every value in its place, and the engine is asked for the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from imports import fill_in, get, import_texts, list_unmentioned, messages, resolve_imported
from job_documents import nowhere

from dsjob.contract import schema as contract
from dsjob.contract.check import check_config
from dsjob.contract.schema import Schema
from dsjob.contract.spec import EngineSpec, view
from dsjob.document.bare import resolve_config
from dsjob.document.resolve import resolve_job
from dsjob.errors import ConfigError, DocumentError
from dsjob.importing.given import nest

ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
# name -> (config, ranks)
PLAIN: dict[str, tuple[dict[str, Any], int]] = {
    "smallest": ({"train_batch_size": 8, "optimizer": {"type": "Adam"}}, 1),
    "triad": (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "optimizer": ADAMW,
        },
        2,
    ),
    "bf16 stage 2": (
        {
            "train_micro_batch_size_per_gpu": 16,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8, "overlap_comm": True},
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "gradient_clipping": 0.3,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        4,
    ),
    "stage 3": (
        {
            "train_batch_size": 32,
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 1e14,
                "reduce_bucket_size": 1e6,
                "stage3_prefetch_bucket_size": 0.94e6,
                "stage3_param_persistence_threshold": 1e4,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "communication_data_type": "fp32",
        },
        8,
    ),
    "one cycle": (
        {
            "train_batch_size": 4,
            "optimizer": ADAMW,
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
        },
        1,
    ),
    "decay with its total": (
        {
            "train_batch_size": 4,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}},
        },
        1,
    ),
    "torch's own": (
        {
            "train_batch_size": 4,
            "optimizer": {"type": "RAdam", "params": {"lr": 0.01}},
            "scheduler": {"type": "StepLR", "params": {"step_size": 30, "gamma": 0.1}},
            "sparse_gradients": True,
            "tensorboard": {"enabled": True, "output_path": "logs"},
        },
        1,
    ),
    "clipping off": ({"train_batch_size": 2, "gradient_clipping": 0, "optimizer": ADAMW, "zero_optimization": {}}, 2),
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_imported_config_asks_the_engine_for_the_same(tmp_path: Path, name: str) -> None:
    config, ranks = PLAIN[name]
    wanted, _ = resolve_config(config, world_size=ranks, locate=nowhere)
    got = view(EngineSpec, resolve_imported(import_texts(tmp_path, {"ds.json": config}), world_size=ranks))
    assert replace(got, trainer=replace(got.trainer, max_steps=None)) == wanted


@pytest.mark.parametrize("name", PLAIN)
def test_every_key_of_a_config_is_in_the_job(tmp_path: Path, name: str) -> None:
    imported = import_texts(tmp_path, {"ds.json": PLAIN[name][0]})
    assert messages(imported, "unknown") == messages(imported, "left out") == messages(imported, "conflict") == ""


def test_what_a_job_has_no_section_for_goes_to_deepspeed(tmp_path: Path) -> None:
    document = import_texts(tmp_path, {"ds.json": PLAIN["torch's own"][0]}).document
    assert document["deepspeed"] == {"sparse_gradients": True}
    assert document["monitor"] == {"tensorboard": {"enabled": True, "output_path": "logs"}}


def test_the_ranks_of_a_whole_triad_are_found(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": PLAIN["triad"][0]})
    assert imported.document["launch"] == {"nproc": 2}
    assert "64 = 4 x 8 x 2 ranks" in messages(imported, "changed")


# old spelling -> values at paths, and words of a note
LEGACY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"zero_optimization": True}, {"zero_optimization.stage": 1}, "stage 1"),
    ({"bfloat16": {"enabled": True}}, {"bf16.enabled": True, "bfloat16": None}, "bf16"),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization.offload_optimizer": {"device": "cpu"}, "zero_optimization.cpu_offload": None},
        "offload_optimizer.device=cpu",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_params": True,
                "cpu_offload_use_pin_memory": True,
            }
        },
        {
            "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zero_optimization.offload_param": {"device": "cpu", "pin_memory": True},
        },
        "pin_memory of each offload section",
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True, "cpu_offload": False}},
        {"zero_optimization.offload_param.device": "cpu", "zero_optimization.offload_optimizer": None},
        "offload_param.device=cpu",
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
        "stage3_gather_16bit_weights_on_model_save",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_param_persistence_threshold": "auto",
            }
        },
        {
            "zero_optimization.reduce_bucket_size": "auto",
            "zero_optimization.stage3_prefetch_bucket_size": "auto",
            "zero_optimization.stage3_param_persistence_threshold": "auto",
        },
        "hidden size",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 0.5}}},
        {"gradient_clipping": 0.5, "optimizer.params": {"lr": 1e-3}},
        "gradient_clipping",
    ),
    (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 1e8}},
        {"zero_optimization.stage3_max_live_parameters": 1e8},
        "stage3_max",
    ),
]


@pytest.mark.parametrize(("config", "wanted", "words"), LEGACY)
def test_legacy_spellings(tmp_path: Path, config: dict[str, Any], wanted: dict[str, Any], words: str) -> None:
    imported = import_texts(tmp_path, {"ds.json": {"train_batch_size": 4, **config}})
    assert {path: get(imported.document, path) for path in wanted} == wanted
    assert words in messages(imported, "changed")
    resolve_imported(imported)


def test_auto_without_a_trainer_is_the_trainers_default_and_is_told(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
    }
    imported = import_texts(tmp_path, {"ds.json": config})
    document = imported.document
    assert document["trainer"] == {"micro_batch": 8, "grad_accum": 1}
    assert document["optimizer"]["params"] == {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert document["scheduler"]["params"]["warmup_max_lr"] == 5e-5
    assert document["scheduler"]["params"]["warmup_num_steps"] == 1
    assert document["scheduler"]["params"]["total_num_steps"] == "auto"
    assert "optimizer.params.lr: auto means 5e-05 (--learning_rate, the Trainer's default)" in messages(
        imported, "auto"
    )
    assert "trainer.train_batch: auto means that it is derived from the other batch sizes" in messages(imported, "auto")
    resolve_imported(imported)


def test_more_unknown_keys_than_are_told_one_by_one(tmp_path: Path) -> None:
    params = {"lr": 0.1, **{f"key_{n}": n for n in range(200)}}
    config = {"optimizer": {"type": "AdamW", "params": params}, **{f"other_{n}": n for n in range(200)}}
    imported = import_texts(tmp_path, {"ds.json": {"train_batch_size": 8, **config}})
    assert imported.document["optimizer"] == {"type": "AdamW", "params": {"lr": 0.1}}
    assert imported.document["trainer"] == {"train_batch": 8}
    unknown = messages(imported, "unknown")
    assert [n for n in range(200) if f"key_{n}" not in unknown or f"other_{n}" not in unknown] == []
    assert len(unknown.splitlines()) == 102


def test_wrong_values_without_end_take_no_time(tmp_path: Path) -> None:
    params = {"betas": ["x"] * 20_000}
    start = time.monotonic()
    with pytest.raises(DocumentError) as caught:
        import_texts(tmp_path, {"ds.json": {"optimizer": {"type": "AdamW", "params": params}}})
    assert len(caught.value.problems) == 1
    assert time.monotonic() - start < 30  # it took minutes


@pytest.mark.parametrize("key", ["cpu_offload", "cpu_offload_params"])
def test_an_old_switch_that_is_none(tmp_path: Path, key: str) -> None:
    with pytest.raises(
        DocumentError, match=f"ds.json:3:3: error.*zero_optimization.{key}=perhaps: must be true or fal"
    ):
        import_texts(tmp_path, {"ds.json": {"zero_optimization": {key: "perhaps"}}})


def test_pinned_memory_of_nothing_is_left_out(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": True}}
    imported = import_texts(tmp_path, {"ds.json": config})
    assert "cpu_offload_use_pin_memory=true: this config offloads nothing" in messages(imported, "left out")
    assert "pin_memory" not in messages(imported, "changed")


def test_of_two_configs_the_later_counts(tmp_path: Path) -> None:
    files = {"a.json": {"gradient_clipping": 1, "fp16": {"enabled": True}}, "b.json": {"gradient_clipping": 2}}
    imported = import_texts(tmp_path, files)
    assert imported.document["gradient_clipping"] == 2
    assert imported.document["fp16"] == {"enabled": True}
    assert "b.json:2:2) overrides gradient_clipping=1" in messages(imported, "conflict")
    assert messages(imported, "conflict").endswith(": it comes later")


def test_a_method_that_nobody_names_is_to_be_filled_in(tmp_path: Path) -> None:
    config = {"optimizer": {"params": {"lr": 0.1}}, "scheduler": {"params": {"warmup_num_steps": 5}}}
    imported = import_texts(tmp_path, {"ds.json": config})
    assert "optimizer.type: no source names the type to which optimizer.params.lr=0.1 belongs" in messages(
        imported, "fill in"
    )
    assert "scheduler.type: no source names the type" in messages(imported, "fill in")
    assert list_unmentioned(imported) == []


def test_what_contradicts_itself_is_to_be_mended(tmp_path: Path) -> None:
    zero = {"stage": 1, "offload_param": {"device": "cpu"}}
    config = {"zero_optimization": zero, "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    command = "deepspeed --num_gpus 2 t.py"
    imported = import_texts(tmp_path, {"ds.json": {**config, "gradient_accumulation_steps": 2}}, command)
    mend = messages(imported, "mend")
    assert (
        "ds.json:5:4: zero_optimization.offload_param.device: has no effect below stage 3, but the stage is 1" in mend
    )
    assert "trainer.train_batch: train_batch 7 (" in mend
    assert list_unmentioned(imported) == []


def test_mistyped_keys_are_noted_with_a_suggestion_and_their_place(tmp_path: Path) -> None:
    text = """{
 "train_batch_size": 8,
 "zero_optimization": {"stage": 2,
   "overlap_com": true},
 "gradient_cliping": 1.0
}"""
    imported = import_texts(tmp_path, {"ds.json": text})
    unknown = messages(imported, "unknown")
    assert 'ds.json:4:4: zero_optimization.overlap_com=true: did you mean "overlap_comm"?' in unknown
    assert 'ds.json:5:2: gradient_cliping=1.0: did you mean "gradient_clipping"?' in unknown
    assert imported.document["zero_optimization"] == {"stage": 2}
    resolve_imported(imported)


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage", "must be one of 0, 1, 2, 3"),
        ({"gradient_accumulation_steps": "8"}, "trainer.grad_accum", "without the quotes"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "3e-5"}}},
            "optimizer.params.lr",
            "write 3e-5 without the quotes",
        ),
    ],
)
def test_wrong_values_are_refused_with_their_place(
    tmp_path: Path, config: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        import_texts(tmp_path, {"ds.json": {"train_batch_size": 8, **config}})
    problem = caught.value.problems[0]
    assert problem.dotted == path
    assert problem.line > 1
    assert words in str(problem)


def test_what_dsjob_does_not_support_is_left_out_and_told(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": ADAMW,
        "amp": {"enabled": True, "opt_level": "O1"},
        "compile": {"deepcompile": True},
    }
    with pytest.raises(ConfigError):
        resolve_config(config, world_size=1, locate=nowhere)
    imported = import_texts(tmp_path, {"ds.json": config})
    assert imported.document["amp"] == {"enabled": True, "opt_level": "O1"}
    assert "compile" not in imported.document
    assert "ds.json:" in messages(imported, "not supported")
    told = "compile.deepcompile true is not supported by dsjob: left out; not built yet"
    assert told in messages(imported, "not supported")
    resolve_imported(imported)


def test_what_is_on_nvme_stays_there(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5}
    sections = {"offload_optimizer": disk, "offload_param": disk}
    config = {"train_batch_size": 8, "optimizer": ADAMW, "zero_optimization": {"stage": 3, **sections}}
    imported = import_texts(tmp_path, {"ds.json": {**config, "aio": {"queue_depth": 4}}})
    zero = imported.document["zero_optimization"]
    assert zero["offload_optimizer"] == disk
    assert zero["offload_param"] == disk
    assert imported.document["aio"] == {"queue_depth": 4}
    resolve_imported(imported)


def list_refused(node: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path and a value of all in the schema of DeepSpeed configs that dsjob does not support, with what it needs
    beside it: the type of a method."""
    for key, below in node.get("properties", {}).items():
        here = (*path, key)
        if below.get("x-status") == "unsupported":
            yield here, make_value(below), {}
        yield from list_refused(below, here)
        for branch in below.get("allOf", ()):
            pattern = branch["if"]["properties"]["type"].get("pattern", "")
            kind = re.sub(r"\[\w\w\]\?", "", pattern).strip("^$")
            kind = re.sub(r"\[\w(\w)\]", r"\1", kind)
            for inner, value, _ in list_refused(branch.get("then", {}), here):
                yield inner, kind if inner == (*here, "type") else value, {"type": kind}


def make_value(schema: Schema) -> Any:
    """A value that a key takes and that asks for something."""
    kind, default = schema.get("type", "string"), schema.get("default")
    if kind == "object":
        required = {key: make_value(schema["properties"][key]) for key in schema.get("required", ())}
        return {**required, "enabled": True} if "enabled" in schema.get("properties", {}) else required
    if "enum" in schema:
        return next(value for value in schema["enum"] if value != default)
    return {"boolean": not default, "integer": 4, "number": 0.5, "array": [], "string": "fp32"}[
        kind if isinstance(kind, str) else kind[0]
    ]


REFUSED = list(list_refused(contract.deepspeed_schema()))


@pytest.mark.parametrize(("path", "value", "beside"), REFUSED, ids=[".".join(path) for path, _, _ in REFUSED])
def test_nothing_that_validate_refuses_is_carried(
    tmp_path: Path, path: tuple[str, ...], value: Any, beside: dict[str, Any]
) -> None:
    """Over the schema: what is refused in a DeepSpeed config is noted, and the document that is imported is sound."""
    config: dict[str, Any] = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    beside = {"stage": 3} if path[0] == "zero_optimization" else beside
    config[path[0]] = {**beside, **nest(path[1:], value)} if path[1:] else value
    found = check_config(config)
    assert [problem for problem in found if problem.severity == "error" and problem.rule == "unsupported"]
    imported = import_texts(tmp_path, {"ds.json": config})
    document = fill_in(imported.document)
    resolved = resolve_job(document, world_size=8, locate=nowhere)
    assert [problem for problem in resolved.warnings if problem.rule == "unsupported"] == []
    told = "\n".join(str(note) for note in imported.notes)
    path = ("bf16", *path[1:]) if path[0] == "bfloat16" else path
    assert ".".join(path) in told or any(f"{'.'.join(path[:n])} is not supported" in told for n in range(1, len(path)))


def test_the_schema_refuses_many_things() -> None:
    assert len(REFUSED) > 40


def test_comments_and_trailing_commas_are_welcome(tmp_path: Path) -> None:
    text = '{ // of 2021\n  "train_batch_size": 8, # all ranks\n  "fp16": {"enabled": false, "loss_scale": 0,},\n}'
    assert import_texts(tmp_path, {"ds.hjson": text}).document["trainer"] == {"train_batch": 8}
