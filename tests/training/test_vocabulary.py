"""`ops.linear_cross_entropy`: jobs over models of transformers give the same losses and weights as with logits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import token_jobs
import torch
from ranks import run_ranks
from torch import Tensor

from dsjob.compute import deferred_logits
from dsjob.errors import ContractError
from dsjob.ranks.mesh import World
from dsjob.training import vocabulary

pytest.importorskip("transformers")
pytest.importorskip("peft")
Ended = tuple[list[dict[str, float]], dict[str, Tensor]]
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def train(folder: str, kind: str, wish: str, world: World | None = None, **sections: Any) -> tuple[Ended, int]:
    """What a job has logged, its weights at the end, and how often it computed a loss without logits."""
    model = {"_target_": "token_jobs.build_of_transformers", "kind": kind}
    given = {"model": model, "ops": {"linear_cross_entropy": wish}, "micro_batch": 2, **sections}
    document = token_jobs.make_document(tempfile.mkdtemp(dir=folder), **given)
    op = deferred_logits.linear_cross_entropy
    with mock.patch.object(deferred_logits, "linear_cross_entropy", side_effect=op) as called:
        return token_jobs.run(document, world), called.call_count


def run_stages(world: World, folder: str, kinds: list[str], mode: str, stages: list[int]) -> list[tuple[str, Any]]:
    found = []
    for kind in kinds:
        for stage in stages:
            sections = {**MODES[mode], "stage": stage}
            pair = [train(folder, kind, wish, world, **sections) for wish in ("off", "require")]
            found.append((f"{kind} at stage {stage}", pair))
    return found


def require_same(name: str, pair: Any, mode: str = "fp32") -> None:
    ((plain, plain_weights), never), ((records, weights), calls) = pair
    tolerance = 1e-5 if mode == "fp32" else 2e-2
    assert (never, calls > 0) == (0, True), name
    for ours, theirs in zip(records, plain, strict=True):
        for key in {"loss", "eval/loss", "grad_norm"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance), name
    for key, weight in plain_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=10 * tolerance, atol=tolerance, msg=f"{name}: {key}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.full(*(f"some-{ranks}-{mode}" for ranks in (1, 2) for mode in MODES if (ranks, mode) != (2, "fp32")))
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "whole"])
def test_a_job_is_the_same_without_logits(tmp_path: Path, whole: bool, ranks: int, mode: str) -> None:
    """With targets that differ in number, micro batches without any, LoRA, a shared weight, and an evaluation."""
    kinds, stages = (
        (["GPT2", "Llama", "T5", "Lora"], [0]) if ranks == 1 else (["GPT2"], [0, 1, 2, 3] if whole else [1, 3])
    )
    for name, pair in run_ranks(run_stages, ranks, str(tmp_path), kinds, mode, stages)[0]:
        require_same(name, pair, mode)


@pytest.mark.full
def test_the_unit_of_the_head_gathers_its_weight(tmp_path: Path) -> None:
    """With autocast at stage 3, FSDP2 gathers the head by itself. Llama in peft's model is not the root either."""
    for name, pair in run_ranks(run_stages, 2, str(tmp_path), ["Lora"], "autocast", [3])[0]:
        require_same(name, pair, "autocast")


@pytest.mark.parametrize(
    ("kind", "sections", "reason"),
    [
        ("Granite", {}, "something else than the cross entropy of Granite"),
        ("Llama", {"label_smoothing": 0.1}, "the loss is not the model's own"),
        ("Llama", {"metrics": {"acc": {"_target_": "token_jobs.accuracy", "phases": ["train"]}}}, "metrics of"),
        ("Tagger", {"model": {"_target_": "token_jobs.Tagger"}}, "Tagger is not a model of transformers"),
        ("Head", {"model": {"_target_": "token_jobs.build_adapted_head"}}, "not a plain torch.nn.Linear, but"),
    ],
)
def test_require_says_why_it_is_not_possible(tmp_path: Path, kind: str, sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        train(str(tmp_path), kind, "require", **sections)
    if kind in ("Granite", "Head"):  # auto holds the logits
        with mock.patch.object(vocabulary, "WORTHWHILE", 1):
            _, calls = train(str(tmp_path), kind, "auto", **sections)
        assert calls == 0


def test_auto_needs_many_logits_and_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, calls = train(str(tmp_path), "Llama", "auto")
    assert calls == 0
    assert "linear_cross_entropy" not in capsys.readouterr().out
    with mock.patch.object(vocabulary, "WORTHWHILE", 2 * token_jobs.LENGTH * token_jobs.VOCAB):
        require_same("auto", ((few, 0), train(str(tmp_path), "Llama", "auto")))
    assert capsys.readouterr().out.count("the loss is computed in chunks of the vocabulary") == 1


def run_reading(world: World, folder: str) -> list[Any]:
    sections: dict[str, Any] = {"trainer": {"parts": {"_target_": "token_jobs.Reads"}}, "stage": 3}
    with mock.patch.object(vocabulary, "WORTHWHILE", 1):
        return [train(folder, "Llama", wish, world, **sections) for wish in ("off", "auto")]


def test_a_loss_of_the_users_may_read_the_logits(tmp_path: Path) -> None:
    """At stage 3, after the model's own loss has been computed without them. From then on, the job holds them."""
    pair = run_ranks(run_reading, 2, str(tmp_path))[0]
    assert pair[1][1] == 1
    require_same("own loss", pair)
