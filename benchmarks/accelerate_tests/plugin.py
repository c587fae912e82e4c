"""A pytest plugin that lets accelerate's own DeepSpeed tests run on a CPU without the Hub.

It lifts the conditions that ask for a GPU, names gloo as the backend, and builds small models in folders with the names
that the tests would download: transformers prefers a folder to the Hub.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from accelerate.state import PartialState
from accelerate.test_utils import testing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MobileViTConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)


def _stay(test: Any) -> Any:
    return test


def _make_models() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=8, n_layer=2, n_head=2))
    for name in ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2"):
        gpt2.save_pretrained(name)
    bert = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    BertForSequenceClassification(bert).save_pretrained("bert-base-cased")
    MobileViTConfig(hidden_sizes=[16, 24, 32]).save_pretrained("apple/mobilevit-xx-small")
    experts = Qwen2MoeConfig(
        vocab_size=100, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2,
        shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
    )  # fmt: skip
    Qwen2MoeForCausalLM(experts).save_pretrained("peft-internal-testing/tiny-random-qwen-1.5-MoE")


def pytest_configure(config: pytest.Config) -> None:
    testing.require_non_cpu = testing.require_fp16 = _stay
    choose = PartialState._prepare_backend

    def choose_gloo(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return choose(self, cpu, sagemaker_dp, backend or "gloo")

    PartialState._prepare_backend = choose_gloo
    os.chdir(tempfile.mkdtemp())
    _make_models()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Writes the result of each test as a line of JSON to the file that ACCELERATE_OUT names."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        failure = getattr(report.longrepr, "reprcrash", None)
        error = failure.message if failure else str(report.longrepr[2]) if report.skipped else ""
        if report.when != "teardown":
            entry = {"test": item.nodeid.split("/")[-1], "outcome": report.outcome, "error": error}
            with open(os.environ["ACCELERATE_OUT"], "a") as file:
                file.write(json.dumps(entry) + "\n")
