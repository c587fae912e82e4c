"""accelerate's files, and the options of `accelerate launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from imports import get, import_command, import_texts, messages, resolve_imported

from dsjob.errors import DocumentError
from dsjob.importing import accelerate

DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
use_cpu: false
"""
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_sharding_strategy: {strategy}
  fsdp_transformer_layer_cls_to_wrap: T5Block
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
FSDP2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_state_dict_type: SHARDED_STATE_DICT
num_processes: 4
"""
# name -> (file, values at paths, words of notes)
FILES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "deepspeed": (
        DEEPSPEED,
        {
            "trainer.grad_accum": 4,
            "gradient_clipping": 0.5,
            "bf16.enabled": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "launch": {"nproc": 8},
        },
        ("zero3_init_flag=true: dsjob decides", "num_machines=2: start dsjob with torchrun"),
    ),
    "fsdp full": (
        FSDP.format(strategy="FULL_SHARD"),
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "launch.nproc": 8,
        },
        ("fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP: dsjob finds the blocks", "fsdp_transformer_layer_cls_to_wrap"),
    ),
    "fsdp by number": (FSDP.format(strategy=2), {"zero_optimization.stage": 2}, ()),
    "fsdp hybrid": (FSDP.format(strategy="HYBRID_SHARD"), {"zero_optimization.stage": 3}, ("not within each node",)),
    "fsdp 2": (FSDP2.format(reshard="true"), {"zero_optimization.stage": 3}, ("fsdp_state_dict_type",)),
    "fsdp 2, gathered once": (FSDP2.format(reshard="false"), {"zero_optimization.stage": 2}, ()),
    "fsdp 1's word": (FSDP2.format(reshard="SHARD_GRAD_OP"), {"zero_optimization.stage": 2}, ()),
    "several GPUs": (
        "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 4\ngpu_ids: 0,1,2,3\n",
        {"launch": {"nproc": 4, "include": "localhost:0,1,2,3"}, "fp16.enabled": True},
        (),
    ),
    "GPUs by name": (
        "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: GPU-5ebe,GPU-7a01\n",
        {"launch": {"nproc": 2}},
        ("CUDA_VISIBLE_DEVICES=GPU-5ebe,GPU-7a01",),
    ),
    "CPUs": ("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n", {"launch.device": "cpu"}, ()),
    "compiled": (
        "distributed_type: 'NO'\ndynamo_config:\n  dynamo_backend: INDUCTOR\nnum_processes: 1\n",
        {"launch": {"nproc": 1}, "compile": {"enabled": True, "backend": "inductor"}},
        (),
    ),
    "what dsjob has no counterpart of": (
        "distributed_type: MEGATRON_LM\nmixed_precision: fp8\nnum_processes: 4\nmegatron_lm_config:\n  tp: 2\n",
        {"launch.nproc": 4, "bf16": None},
        ("set tensor_parallel.size and pipeline.stages", "8-bit floats are not supported", "megatron_lm_config"),
    ),
    "hostfile": (
        (
            "deepspeed_config:\n  deepspeed_hostfile: hosts\n  deepspeed_multinode_launcher: pdsh\n  zero_stage: 2\n"
            "  deepspeed_inclusion_filter: 'a@b:0'\ndistributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 4\n"
        ),
        {"zero_optimization.stage": 2, "launch.nproc": 2},
        ("deepspeed_hostfile=hosts", "deepspeed_multinode_launcher=pdsh", "deepspeed_inclusion_filter"),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    text, wanted, notes = FILES[name]
    imported = import_texts(tmp_path, {"default_config.yaml": text})
    assert {path: get(imported.document, path) for path in wanted} == wanted
    told = "\n".join(map(str, imported.notes))
    assert [words for words in notes if words not in told] == []
    assert messages(imported, "unknown") == ""
    resolve_imported(imported)


def test_notes_name_the_line_of_a_nested_key(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"default_config.yaml": DEEPSPEED})
    assert "default_config.yaml:8:3: zero3_init_flag=true" in messages(imported, "left out")


def test_mistyped_keys_get_a_suggestion(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_proceses: 4\nmixed_precision: bf16\n"
    text += "fsdp_config:\n  fsdp_ofload_params: true\n"
    unknown = messages(import_texts(tmp_path, {"a.yaml": text}), "unknown")
    assert 'a.yaml:2:1: num_proceses=4: did you mean "num_processes"?' in unknown
    assert "a.yaml:5:3: fsdp_ofload_params=true" in unknown


def test_a_number_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"a\.yaml:2:1: error\[type\]: num_processes=all: must be a number"):
        import_texts(tmp_path, {"a.yaml": "distributed_type: MULTI_GPU\nnum_processes: all\nmachine_rank: 0\n"})


def test_the_deepspeed_file_that_it_names(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
    }
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n"
    files = {"acc.yaml": text + "  gradient_accumulation_steps: 2\n  zero_stage: 2\n", "zero.json": config}
    imported = import_texts(tmp_path, files, given=["acc.yaml"])
    assert imported.document["zero_optimization"] == {"stage": 2}
    assert imported.document["bf16"] == {"enabled": True}
    assert imported.document["trainer"] == {"grad_accum": 2}
    assert "zero_optimization.stage: auto means 2 (zero_stage" in messages(imported, "auto")


def test_a_deepspeed_file_that_is_not_there(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: nowhere.json\n"
    with pytest.raises(DocumentError) as caught:
        import_texts(tmp_path, {"acc.yaml": text})
    (problem,) = caught.value.problems
    assert problem.place == f"{tmp_path}/acc.yaml:3:3"
    assert "deepspeed_config_file=nowhere.json: no such file" in problem.message


WRONG = {
    "distributed_type: DEEPSPED": ("distributed_type=DEEPSPED: must be one of NO, MULTI_GPU", 'mean "DEEPSPEED"'),
    "deepspeed_config: 5": ("deepspeed_config=5: must be an object",),
    "fsdp_config: []": ("fsdp_config=[]: must be an object",),
    "num_processes: 1.5": ("num_processes=1.5: must be an integer, at least 1",),
    "num_machines: 0": ("num_machines=0: must be an integer, at least 1",),
    "use_cpu: perhaps": ("use_cpu=perhaps: must be true or false",),
    "mixed_precision: bf61": ("mixed_precision=bf61: must be one of no, fp16, bf16, fp8", 'did you mean "bf16"?'),
    "zero_stage: x": ("zero_stage=x: must be an integer",),
    "fsdp_sharding_strategy: FULL_SHRAD": ("must name one of", 'did you mean "full_shard"?'),
    "fsdp_offload_params: later": ("fsdp_offload_params=later: must be true or false",),
    "fsdp_reshard_after_forward: 7": ("fsdp_reshard_after_forward=7: must be true or false",),
}


def test_all_wrong_values_are_told_at_once_each_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        import_texts(tmp_path, {"a.yaml": "\n".join(WRONG)}, kind="accelerate")
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == len(WRONG)
    for line, (text, words) in enumerate(zip(told, WRONG.values(), strict=True), 1):
        assert text.startswith(f"{tmp_path}/a.yaml:{line}:1: error[")
        assert [part for part in words if part not in text] == []


def test_ranks_that_the_machines_do_not_share_evenly(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 5\n"
    with pytest.raises(DocumentError, match=r"a.yaml:3:1: error\[range\]: num_processes=5: cannot be divided among 2"):
        import_texts(tmp_path, {"a.yaml": text})


def test_options_of_the_command_win_over_the_file(tmp_path: Path) -> None:
    command = (
        "accelerate launch --num_processes=4 --num_machines 1 --mixed_precision fp16 --use_deepspeed --zero_stage 2 "
        "--main_process_port 29501 train.py"
    )
    imported = import_texts(tmp_path, {"acc.yaml": DEEPSPEED}, command)
    assert imported.document["launch"] == {"nproc": 4}
    assert imported.document["zero_optimization"]["stage"] == 2
    assert imported.document["fp16"] == {"enabled": True}
    assert "num_processes: --num_processes=4 (command line) overrides num_processes=16" in messages(
        imported, "conflict"
    )


@pytest.mark.parametrize("name", sorted({*accelerate.PATHS, *accelerate.LEFT_OUT} - {"module", "no_python", "quiet"}))
def test_every_option_is_known(name: str) -> None:
    value = "2" if accelerate.PATHS.get(name, "").endswith(("stage", "accum", "clipping")) else "cpu"
    value = {"zero3_save_16bit_model": "true", "dynamo_mode": "max-autotune"}.get(name, value)
    switch = name in ("debug", "same_network", "enable_cpu_affinity", "dynamo_use_dynamic", "dynamo_use_fullgraph")
    switch = switch or name == "dynamo_use_regional_compilation"
    imported = import_command(f"accelerate launch --{name} {'' if switch else value} train.py")
    assert messages(imported, "unknown") == ""
    if name in accelerate.PATHS:
        assert get(imported.document, accelerate.PATHS[name]) is not None
    elif name != "same_network":
        assert f"--{name}=" in messages(imported, "left out")
