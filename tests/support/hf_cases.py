"""Runs of HF's Trainer: the programs of tests/programs/programs with configs and arguments, and what DeepSpeed records.

    python tests/support/hf_cases.py

runs those of the normal test run (`RECORDED`) on the installed DeepSpeed, on the CPU, and writes tests/data/hf_trainer:
what they record, and one checkpoint.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from side_by_side import TIMINGS, Run, run_on

PROGRAMS = Path(__file__).parent.parent / "programs" / "programs"
DATA = Path(__file__).parent.parent / "data" / "hf_trainer"
SAVED = "causal_lm, stage 2, fp32, saving"  # the case whose first checkpoint is kept

AUTO_RATES = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
ADAMW = {"type": "AdamW", "params": {**AUTO_RATES, "torch_adam": True}}  # DeepSpeed would compile its own for minutes
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}
CPU = {"device": "cpu"}
AUTO = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "sub_group_size": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
GENERATE = ["--predict_with_generate", "--generation_max_length", "8"]
SAVING = ["--save_strategy", "steps", "--save_steps", "2"]


@dataclass(frozen=True)
class Case:
    """A program with its DeepSpeed config and arguments, beside those that all runs have (`make_run`)."""

    program: str
    stage: int
    precision: str = "fp32"
    about: str = ""
    zero: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        parts = [self.program, f"stage {self.stage}", self.precision, self.about]
        return ", ".join(part for part in parts if part)


def _list_cases() -> list[Case]:
    kinds = [*((stage, "fp32") for stage in range(4)), (2, "bf16"), (3, "bf16")]
    found = [Case(program, *kind) for program in ("causal_lm", "classification", "seq2seq") for kind in kinds]
    pairs = {
        "DeepSpeed's optimizer and schedule": {"optimizer": ADAMW, "scheduler": DECAY},
        "DeepSpeed's optimizer": {"optimizer": ADAMW},
        "DeepSpeed's schedule": {"scheduler": WARMUP},
    }
    warm = ["--warmup_steps", "3", "--weight_decay", "0.1", "--lr_scheduler_type", "cosine"]
    for stage in range(4):
        found += [Case("causal_lm", stage, "fp32", about, {}, given, warm) for about, given in pairs.items()]
        found.append(Case("causal_lm", stage, "fp32", "HF's optimizer and schedule", {}, {}, warm))
        found.append(Case("causal_lm", stage, "fp32", "accumulating", arguments=["--gradient_accumulation_steps", "3"]))
        found.append(Case("causal_lm", stage, "fp32", "checkpointed", arguments=["--gradient_checkpointing"]))
        found.append(Case("causal_lm", stage, "fp32", "saving", arguments=SAVING))
    best = ["--load_best_model_at_end", "--metric_for_best_model", "accuracy", *SAVING, "--eval_steps", "2"]
    for stage in (2, 3):
        own = {"optimizer": ADAMW} if stage == 2 else {}
        found.append(Case("causal_lm", stage, "fp32", "optimizer offloaded", {"offload_optimizer": CPU}, own))
        found.append(Case("classification", stage, "fp32", "best model", arguments=best))
        found.append(Case("classification", stage, "fp32", "auto", AUTO, pairs["DeepSpeed's optimizer and schedule"]))
    both = {"offload_optimizer": CPU, "offload_param": CPU}
    found.append(Case("causal_lm", 3, "fp32", "all offloaded", both))
    found.append(Case("causal_lm", 3, "bf16", "all offloaded", both, {"optimizer": ADAMW}))
    found.append(Case("classification", 3, "fp32", "gathered best model", AUTO, arguments=best))
    found.append(Case("classification", 3, "fp32", "evaluated only"))
    found.append(Case("seq2seq", 3, "fp32", "auto", AUTO, arguments=GENERATE))
    return found


CASES = {case.name: case for case in _list_cases()}
RECORDED = [
    *(f"causal_lm, stage {stage}, fp32" for stage in range(4)),
    "causal_lm, stage 2, bf16",
    "causal_lm, stage 1, fp32, DeepSpeed's optimizer and schedule",
    "causal_lm, stage 2, fp32, DeepSpeed's schedule",
    "causal_lm, stage 3, fp32, DeepSpeed's optimizer",
    "causal_lm, stage 3, fp32, accumulating",
    SAVED,
    "classification, stage 2, fp32, best model",
    "classification, stage 3, fp32, auto",
    "classification, stage 3, fp32, evaluated only",
    "seq2seq, stage 2, fp32",
    "seq2seq, stage 3, fp32",
]


def make_run(case: Case, folder: Path, start: Path, *more: str) -> Run:
    """The run of a case. folder: to run in. start: the folder of `make_pretrained`'s models. more: more arguments."""
    config = {
        # On the CPU, DeepSpeed's zero.Init sees one rank when from_pretrained calls it, and refuses the product.
        **({"train_batch_size": "auto"} if case.program == "causal_lm" else {}),
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": case.stage, **case.zero},
        "bf16": {"enabled": "auto"},
        **case.sections,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(config))
    model = {"classification": [str(start / "bert")], "seq2seq": [str(start / "t5"), *GENERATE]}.get(case.program, [])
    usual = {
        "output_dir": "out", "deepspeed": "ds.json", "max_steps": "4", "learning_rate": "1e-2", "logging_steps": "1",
        "per_device_train_batch_size": "4", "eval_strategy": "steps", "eval_steps": "3", "save_strategy": "no",
        "report_to": "none", "disable_tqdm": "True",
    }  # fmt: skip
    flags = ["--use_cpu", *(["--bf16"] if case.precision == "bf16" else [])]
    flags += [] if case.about == "evaluated only" else ["--do_train"]
    named = [word for key, value in usual.items() for word in (f"--{key}", value)]
    return Run(PROGRAMS / f"{case.program}.py", folder, [*model, *named, *flags, *case.arguments, *more])


def make_start(folder: Path) -> Run:
    """The run that writes the models which other runs start from, into `folder`."""
    return Run(PROGRAMS / "make_pretrained.py", folder, ranks=1)


def drop_timings(records: Any) -> Any:
    """Records without what differs in each run."""
    if isinstance(records, dict):
        return {key: drop_timings(value) for key, value in records.items() if key not in TIMINGS}
    return [drop_timings(each) for each in records] if isinstance(records, list) else records


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        runs = [make_run(CASES[case], work / str(number), work / "start") for number, case in enumerate(RECORDED)]
        records = run_on("deepspeed", [make_start(work / "start"), *runs])[1:]
        shutil.rmtree(DATA, ignore_errors=True)
        DATA.mkdir(parents=True)
        found = {case: drop_timings(record) for case, record in zip(RECORDED, records, strict=True)}
        versions = {name: version(name) for name in ("accelerate", "deepspeed", "torch", "transformers")}
        content = {"versions": versions, "records": found}
        (DATA / "records.json").write_text(json.dumps(content, indent=1) + "\n")
        saved = work / str(RECORDED.index(SAVED)) / "out" / "checkpoint-2"
        shutil.copytree(
            saved,
            DATA / saved.name,
            ignore=shutil.ignore_patterns("zero_to_*.py", "*.safetensors", "training_args.bin"),
        )


if __name__ == "__main__":
    main()
