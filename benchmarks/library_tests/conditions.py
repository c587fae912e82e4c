"""Lifts the conditions that ask for a GPU: in the tests' process, and in the ranks that tests start."""

from __future__ import annotations

import os
from typing import Any

import transformers.training_args
from accelerate.state import PartialState


def lift() -> None:
    """Makes accelerate choose gloo for a rank, and `TrainingArguments` accept bf16."""
    choose = PartialState._prepare_backend

    def choose_gloo(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return choose(self, cpu, sagemaker_dp, backend or ("gloo" if "LOCAL_RANK" in os.environ else None))

    PartialState._prepare_backend = choose_gloo
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]
    least = int(os.environ.get("LIBRARY_TESTS_WARMUP", "0"))
    count = transformers.TrainingArguments.get_warmup_steps

    def count_at_least(self: Any, num_training_steps: int) -> int:
        return max(least, int(count(self, num_training_steps)))

    transformers.TrainingArguments.get_warmup_steps = count_at_least  # type: ignore[method-assign]
