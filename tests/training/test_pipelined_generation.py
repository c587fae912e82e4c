"""Jobs whose stages generate together: the tokens of one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ranks import run_ranks
from test_pipelined_jobs import fail, make_document, run

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "top_k": 20, "temperature": 0.8}
# Token 0 ends texts, so that the pipelines of a job make different numbers of passes.
ENDING: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
BEAMS: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}


def describe(kind: str, folder: str, settings: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A job that trains a few steps and generates in its evaluations and a prediction; if it samples, one that only
    predicts, since each step of a pipeline draws a random number."""
    data = {"_target_": "pipelined_models.Tokens", "prompt": 2}
    metric = {
        "_target_": "pipelined_models.count_kinds",
        "inputs": {"preds": "outputs.generated", "target": "batch.labels"},
    }
    return make_document(
        kind,
        folder,
        # Else such small models would repeat one token.
        model={"_target_": f"pipelined_models.build_{kind}", **({"spread": 0.5} if kind != "t5" else {})},
        data={"train": data, "eval": {**data, "length": 7, "seed": 1}},
        generation=settings,
        metrics={"kinds": metric},
        predict={"format": "jsonl"},
        tasks=["predict"] if settings["do_sample"] else ["train", "predict"],
        **{"trainer": {"max_steps": 3, "eval_micro_batch": 2}, **sections},
    )


def read(folder: str) -> tuple[list[list[int]], list[float]]:
    """The tokens that were generated for each sample, and the metric of each evaluation."""
    lines = Path(folder, "predictions-eval.jsonl").read_text().splitlines()
    records = Path(folder, "metrics.jsonl")
    evaluated = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    return [json.loads(line)["generated"] for line in lines], [
        record["eval/kinds"] for record in evaluated if "eval/kinds" in record
    ]


@cache
def generate_alone(kind: str, settings: str) -> tuple[list[list[int]], list[float]]:
    with TemporaryDirectory() as folder:
        run_ranks(run, 1, [describe(kind, folder, json.loads(settings))])
        return read(folder)


TWO, FOUR = {"pipeline": {"stages": 2}}, {"pipeline": {"stages": 4}}
CASES: list[Any] = [
    (2, "gpt2", GREEDY, TWO),
    (2, "llama", SAMPLED, TWO),
    pytest.param(2, "llama", GREEDY, TWO, marks=pytest.mark.full),
    pytest.param(2, "gpt2", SAMPLED, TWO, marks=pytest.mark.full),
    pytest.param(4, "gpt2", SAMPLED, FOUR, marks=pytest.mark.full),
    pytest.param(4, "llama", GREEDY, FOUR, marks=pytest.mark.full),
    pytest.param(2, "gpt2", BEAMS, TWO, marks=pytest.mark.full),
    pytest.param(4, "gpt2", GREEDY, TWO, marks=pytest.mark.full),
    pytest.param(4, "llama", ENDING, {**TWO, "zero_optimization": {"stage": 3}}, marks=pytest.mark.full),
    pytest.param(4, "llama", {**ENDING, **BEAMS}, {**TWO, "zero_optimization": {"stage": 1}}, marks=pytest.mark.full),
    pytest.param(4, "llama", SAMPLED, {**TWO, "tensor_parallel": {"size": 2, "plan": "auto"}}, marks=pytest.mark.full),
    pytest.param(
        2,
        "llama",
        GREEDY,
        {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}},
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("ranks", "kind", "settings", "sections"), CASES)
def test_stages_generate_the_tokens_of_one_process(
    ranks: int, kind: str, settings: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(run, ranks, [describe(kind, str(tmp_path), settings, **sections)])
    rows, kinds = read(str(tmp_path))
    alone, kinds_alone = generate_alone(kind, json.dumps(settings))
    assert rows == alone
    assert len(rows) == 7
    assert len({token for row in rows for token in row}) > 3
    assert kinds == pytest.approx(kinds_alone)


def test_a_model_that_calls_its_encoder_alone_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    for (told,) in run_ranks(fail, 2, [describe("t5", str(tmp_path), GREEDY, **TWO)]):
        assert told.startswith("model._target_: model: T5ForConditionalGeneration generates with its encoder once")
