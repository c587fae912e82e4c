"""Runs of TRL's trainers: preferences.py and rewarded.py of tests/programs/programs with arguments, and what DeepSpeed
records for them.

    python tests/support/trl_cases.py

runs those of the normal test run (`RECORDED`) on the installed DeepSpeed, on the CPU, and writes `DATA`.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hf_cases import drop_timings
from side_by_side import IMPORTED, Run, run_on

PROGRAMS = Path(__file__).parent.parent / "programs" / "programs"
DATA = Path(__file__).parent.parent / "data" / "trl.json"
LIBRARIES = [
    *IMPORTED,
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "transformers.models.llama.modeling_llama",
]
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "4", "--lora_dropout", "0")
COMMON = (
    "--output_dir out --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_steps 6 --warmup_steps 2"
    " --logging_steps 1 --eval_strategy steps --eval_steps 3 --save_steps 3 --report_to none --use_cpu"
    " --disable_tqdm True --max_length 32 --weight_decay 0.01 --gradient_checkpointing false"
)
REWARDED = (
    "--output_dir out --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 8 --max_steps 4"
    " --logging_steps 1 --report_to none --use_cpu --disable_tqdm True --beta 0.1 --num_iterations 2"
    " --learning_rate 1e-2 --bf16 False --seed 3 --gradient_checkpointing false"
)
# DeepSpeed's own AdamW would be compiled, so the trainer's is used.
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


class Case(NamedTuple):
    """method: sft or dpo. lora: whether an adapter is trained, else all weights. precision: fp32 or bf16."""

    method: str
    lora: bool
    stage: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.method}, {'LoRA' if self.lora else 'all weights'}, stage {self.stage}, {self.precision}"

    def run(self, folder: Path, *more: str) -> Run:
        """The run of this case in a folder of `folder`, which has `make_start`'s model. more: more arguments."""
        zero = {"stage": self.stage, "stage3_gather_16bit_weights_on_model_save": True}
        bf16 = self.precision == "bf16"
        arguments = [
            self.method, "--model_name_or_path", str(folder / "llama"), *COMMON.split(),
            "--deepspeed", json.dumps({**CONFIG, "zero_optimization": zero}),
            "--bf16", str(bf16), "--dtype", "bfloat16" if bf16 else "float32",
            "--learning_rate", "1e-2" if self.lora else "3e-3", *(LORA if self.lora else ()), *more,
        ]  # fmt: skip
        return Run(PROGRAMS / "preferences.py", folder / f"{self.name}{', resumed' if more else ''}", arguments)


def make_rewarded(method: str, stage: int, folder: Path, lora: bool) -> Run:
    """A run with a reference model, in which each batch of answers is used twice. method: grpo or rloo."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    arguments = [
        method, "--model_name_or_path", str(folder / "llama"), "--deepspeed",
        json.dumps({**CONFIG, "zero_optimization": zero}), *(LORA if lora else ()),
        *REWARDED.split(),
    ]  # fmt: skip
    return Run(PROGRAMS / "rewarded.py", folder / f"{method} {stage} {lora}", arguments)


CELLS = [(stage, "fp32") for stage in range(4)] + [(2, "bf16"), (3, "bf16")]
CASES = {
    case.name: case
    for case in (Case(method, lora, *cell) for method, lora, cell in product(("sft", "dpo"), (False, True), CELLS))
}
RECORDED = ["sft, LoRA, stage 3, fp32", "dpo, all weights, stage 2, fp32"]


def make_start(folder: Path) -> Run:
    """The run that writes the model which all others start from, into `folder`."""
    return Run(PROGRAMS / "make_llama.py", folder, ranks=1)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        runs = [make_start(Path(name)), *(CASES[case].run(Path(name)) for case in RECORDED)]
        records: list[Any] = run_on("deepspeed", runs, imported=LIBRARIES)[1:]
    versions = {each: version(each) for each in ("accelerate", "deepspeed", "peft", "torch", "transformers", "trl")}
    found = {case: drop_timings(record) for case, record in zip(RECORDED, records, strict=True)}
    DATA.write_text(json.dumps({"versions": versions, "records": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
