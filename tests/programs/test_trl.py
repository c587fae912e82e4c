"""TRL's trainers, unmodified: on dsjob's engine they record what they record on DeepSpeed's.

The normal run compares two of them with the records in tests/data/trl.json. `-m full` runs all on both engines.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from side_by_side import TIMINGS, compare, run_on
from trl_cases import CASES, DATA, LIBRARIES, RECORDED, Case, make_rewarded, make_start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl"),
]

UNSAVED = ("train_loss", "num_tokens", "eval_num_tokens")  # sums that the trainers do not save


def differences(case: Case, ours: Any, theirs: Any) -> list[str]:
    # At stage 0, DeepSpeed reports no gradient norm in fp32. In bf16, losses have three digits, and the rewards of DPO
    # are differences of sums of them.
    ignored = [*TIMINGS, *(["grad_norm"] if case.stage == 0 else [])]
    if case.precision == "bf16":
        kept = ("loss", "eval_loss", "learning_rate")
        ours, theirs = ([{key: log[key] for key in kept if key in log} for log in logs] for logs in (ours, theirs))
    return compare(ours, theirs, 1e-4 if case.precision == "fp32" else 2e-2, ignored=ignored)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases of the normal run record on dsjob's engine."""
    folder = tmp_path_factory.mktemp("trl")
    runs = [make_start(folder), *(CASES[name].run(folder) for name in RECORDED)]
    return dict(zip(RECORDED, run_on("dsjob", runs, imported=LIBRARIES)[1:], strict=True))


@pytest.mark.parametrize("name", RECORDED)
def test_trl_records_what_it_recorded_on_deepspeed(ours: dict[str, Any], name: str) -> None:
    assert not differences(CASES[name], ours[name], json.loads(DATA.read_text())["records"][name])


@pytest.mark.full
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_trl_records_what_it_records_on_deepspeed(tmp_path: Path, method: str, lora: bool) -> None:
    cases = [case for case in CASES.values() if (case.method, case.lora) == (method, lora)]
    found = {}
    for engine in ("dsjob", "deepspeed"):
        runs = [make_start(tmp_path / engine), *(case.run(tmp_path / engine) for case in cases)]
        found[engine] = run_on(engine, runs, imported=LIBRARIES)[1:]
    pairs = zip(cases, found["dsjob"], found["deepspeed"], strict=True)
    differ = {case.name: differences(case, ours, theirs) for case, ours, theirs in pairs}
    assert not {name: found for name, found in differ.items() if found}


@pytest.mark.full
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_rewarded_answers_and_losses_are_those_on_deepspeed(tmp_path: Path, method: str, lora: bool) -> None:
    """At stage 3 they are those of stage 2: DeepSpeed's stage 3 does not start with these trainers on a CPU."""
    found = {}
    for engine, stages in (("dsjob", (2, 3)), ("deepspeed", (2,))):
        folder = tmp_path / engine
        runs = [make_start(folder), *(make_rewarded(method, stage, folder, lora) for stage in stages)]
        found[engine] = run_on(engine, runs, imported=LIBRARIES)[1:]
    ignored = [*TIMINGS, "step_time", "total_flos"]
    for ours in found["dsjob"]:
        assert not compare(ours, found["deepspeed"][0], 1e-4, ignored=ignored)


@pytest.mark.full
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_resumed_run_equals_the_unbroken_one_and_saves_whole_weights(tmp_path: Path, method: str, lora: bool) -> None:
    case = Case(method, lora, 3, "fp32")
    unbroken = case.run(tmp_path)
    resumed = case.run(tmp_path, "--resume_from_checkpoint", str(unbroken.folder / "out/checkpoint-3"))
    _, whole, rest = run_on("dsjob", [make_start(tmp_path), unbroken, resumed], imported=LIBRARIES)
    assert not compare(rest, whole, 1e-6, ignored=[*TIMINGS, *UNSAVED])
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    saved, again = (load_file(run.folder / "out" / name) for run in (unbroken, resumed))
    shapes = {key.split("layers.0.")[-1]: list(tensor.shape) for key, tensor in saved.items()}
    part = {"self_attn.q_proj.lora_B.weight": [32, 4]} if lora else {"self_attn.k_proj.weight": [16, 32]}
    assert shapes.items() >= part.items()
    assert saved.keys() == again.keys()
    assert all(saved[key].equal(again[key]) for key in saved)
