"""TRL's trainers, unmodified: on dsjob's engine they record what they record on DeepSpeed's. Runs with `-m full`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from side_by_side import IMPORTED, TIMINGS, Run, compare, run_on

pytestmark = [pytest.mark.full, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "programs"
LIBRARIES = [
    *IMPORTED,
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "transformers.models.llama.modeling_llama",
]
UNSAVED = ("train_loss", "num_tokens", "eval_num_tokens")  # sums that the trainers do not save
CELLS = [(stage, "fp32") for stage in range(4)] + [(2, "bf16"), (3, "bf16")]
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "4", "--lora_dropout", "0")
COMMON = (
    "--output_dir out --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_steps 6 --warmup_steps 2"
    " --logging_steps 1 --eval_strategy steps --eval_steps 3 --save_steps 3 --report_to none --use_cpu"
    " --disable_tqdm True --max_length 32 --weight_decay 0.01 --gradient_checkpointing false"
)
# DeepSpeed's own AdamW would be compiled, so the trainer's is used.
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def make_run(folder: Path, method: str, lora: bool, stage: int, precision: str, *more: str) -> Run:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    bf16 = precision == "bf16"
    arguments = [
        method, "--model_name_or_path", str(folder / "llama"), *COMMON.split(),
        "--deepspeed", json.dumps({**CONFIG, "zero_optimization": zero}),
        "--bf16", str(bf16), "--dtype", "bfloat16" if bf16 else "float32",
        "--learning_rate", "1e-2" if lora else "3e-3", *(LORA if lora else ()), *more,
    ]  # fmt: skip
    name = f"{method}-{lora}-{stage}-{precision}{'-resumed' if more else ''}"
    return Run(PROGRAMS / "preferences.py", folder / name, arguments)


def differences(ours: Any, theirs: Any, stage: int, precision: str) -> list[str]:
    # At stage 0, DeepSpeed reports no gradient norm in fp32. In bf16, losses have three digits, and the rewards of DPO
    # are differences of sums of them.
    ignored = [*TIMINGS, *(["grad_norm"] if stage == 0 else [])]
    if precision == "bf16":
        kept = ("loss", "eval_loss", "learning_rate")
        ours, theirs = ([{key: log[key] for key in kept if key in log} for log in logs] for logs in (ours, theirs))
    return compare(ours, theirs, 1e-4 if precision == "fp32" else 2e-2, ignored=ignored)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_trl_records_what_it_records_on_deepspeed(tmp_path: Path, method: str, lora: bool) -> None:
    found = {}
    for engine in ("dsjob", "deepspeed"):
        run_on(engine, [Run(PROGRAMS / "make_llama.py", tmp_path / engine, ranks=1)], imported=LIBRARIES)
        runs = [make_run(tmp_path / engine, method, lora, *cell) for cell in CELLS]
        found[engine] = run_on(engine, runs, imported=LIBRARIES)
    pairs = zip(CELLS, found["dsjob"], found["deepspeed"], strict=True)
    differ = {cell: differences(ours, theirs, *cell) for cell, ours, theirs in pairs}
    assert not {cell: found for cell, found in differ.items() if found}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_resumed_run_equals_the_unbroken_one_and_saves_whole_weights(tmp_path: Path, method: str, lora: bool) -> None:
    run_on("dsjob", [Run(PROGRAMS / "make_llama.py", tmp_path, ranks=1)], imported=LIBRARIES)
    unbroken = make_run(tmp_path, method, lora, 3, "fp32")
    checkpoint = unbroken.folder / "out/checkpoint-3"
    resumed = make_run(tmp_path, method, lora, 3, "fp32", "--resume_from_checkpoint", str(checkpoint))
    logs = run_on("dsjob", [unbroken, resumed], imported=LIBRARIES)
    assert not compare(logs[1], logs[0], 1e-6, ignored=[*TIMINGS, *UNSAVED])
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    saved, again = (load_file(run.folder / "out" / name) for run in (unbroken, resumed))
    shapes = {key.split("layers.0.")[-1]: list(tensor.shape) for key, tensor in saved.items()}
    part = {"self_attn.q_proj.lora_B.weight": [32, 4]} if lora else {"self_attn.k_proj.weight": [16, 32]}
    assert shapes.items() >= part.items()
    assert saved.keys() == again.keys()
    assert all(saved[key].equal(again[key]) for key in saved)
