"""Runs of accelerate programs: those of tests/programs/programs with arguments, and what DeepSpeed records for them.

    python tests/support/accelerate_cases.py

runs those of the normal test run (`RECORDED`) on the installed DeepSpeed, on the CPU, and writes `DATA`.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from side_by_side import Run, run_on

PROGRAMS = Path(__file__).parent.parent / "programs" / "programs"
DATA = Path(__file__).parent.parent / "data" / "accelerate_programs.json"
IMPORTED = [
    "torch", "deepspeed", "accelerate", "datasets", "transformers.models.auto.modeling_auto",
    "transformers.models.bert", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
]  # fmt: skip

ZERO = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}
AUTO = {
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
# accelerate sets no default for `betas`, so they cannot be auto here. torch_adam: DeepSpeed's kernel needs a compiler.
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}
# Which schedule the program passes, by the sections of the config.
PAIRS = {(True, True): "config", (True, False): "callable", (False, True): "config", (False, False): "torch"}


@dataclass(frozen=True)
class Case:
    """A program with its arguments. config: of `accelerate_config_file`, written beside it."""

    program: str
    name: str
    arguments: Sequence[str]
    precision: str = "no"
    config: dict[str, Any] | None = None
    plain: bool = False  # stage 0, at which DeepSpeed reports no gradient norm in fp32

    def run(self, folder: Path, *more: str) -> Run:
        """The run of this case in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.config is not None:
            (folder / "ds.json").write_text(json.dumps(self.config))
        precision = ["--precision", self.precision] if self.precision != "no" else []
        return Run(PROGRAMS / f"accelerate_{self.program}.py", folder, [*self.arguments, *precision, *more])


def _list_cases() -> list[Case]:
    found = []

    def classify(stage: int, about: str, *arguments: str, precision: str = "no") -> None:
        name = f"classify, stage {stage}{about and ', '}{about}"
        found.append(Case("classify", name, ["--stage", str(stage), *arguments], precision, plain=stage == 0))

    for stage in range(4):
        classify(stage, "")
        classify(stage, "accumulating", "--accumulation", "3", "--clipping", "0.3")
        classify(stage, "saving", "--accumulation", "2", "--save_at", "4")
    for stage in (2, 3):
        classify(stage, "offloaded", "--offload", "cpu", "--accumulation", "2")
        classify(stage, "bf16", precision="bf16")
    classify(3, "all offloaded", "--offload", "cpu", "--offload_params", "cpu", "--clipping", "0.3")
    for stage, (optimizer, schedule) in itertools.product(range(4), PAIRS):
        for precision in ("no", "bf16") if stage > 1 and optimizer == schedule else ("no",):
            config = {**AUTO, "zero_optimization": {"stage": stage, **ZERO}}
            config |= {"optimizer": ADAMW} if optimizer else {}
            config |= {"scheduler": DECAY} if schedule else {}
            about = f"{'config' if optimizer else 'torch'} and {PAIRS[optimizer, schedule]}"
            name = f"config file, stage {stage}, {about}{', bf16' if precision == 'bf16' else ''}"
            arguments = ["--config", "ds.json", "--schedule", PAIRS[optimizer, schedule]]
            found.append(Case("config_file", name, arguments, precision, config, plain=stage == 0))
    for stage in range(4):
        found.append(Case("images", f"images, stage {stage}", ["--stage", str(stage), "--checkpoints"]))
    for what, stages, precision in (
        ("distill", (2, 3), "no"), ("distill", (0, 3), "no"), ("both", (2, 3), "no"), ("both", (0, 1), "no"),
        ("distill", (2, 3), "bf16"),
    ):  # fmt: skip
        name = f"two models, {what}, stages {stages[0]} and {stages[1]}{', bf16' if precision == 'bf16' else ''}"
        found.append(Case("two_models", name, ["--what", what, "--stages", *map(str, stages)], precision))
    return found


CASES = {case.name: case for case in _list_cases()}
RECORDED = [
    "classify, stage 0, accumulating",
    "classify, stage 3, saving",
    "config file, stage 2, torch and torch",
    "config file, stage 3, config and config",
    "images, stage 1",
    "two models, both, stages 2 and 3",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        runs = [CASES[case].run(Path(name, str(number))) for number, case in enumerate(RECORDED)]
        records = run_on("deepspeed", runs, imported=IMPORTED)
    for record in records:
        if isinstance(record, dict):
            del record["seconds"], record["peak"]
    versions = {each: version(each) for each in ("accelerate", "deepspeed", "torch", "transformers")}
    lines = [f"{json.dumps(case)}: {json.dumps(record)}" for case, record in zip(RECORDED, records, strict=True)]
    DATA.write_text(f'{{"versions": {json.dumps(versions)}, "records": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
