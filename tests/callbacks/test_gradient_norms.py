"""Norms of parts of the gradient: those of plain autograd, on any number of ranks at any stage."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_jobs import Data, Net, make_document, run

from dsjob.callbacks import GradientNorms
from dsjob.errors import ContractError, NonFiniteLossError
from dsjob.ranks.mesh import World
from dsjob.ranks.seeding import seed_rng


def train(world: World | None, folder: str, by: str, sections: dict[str, Any]) -> None:
    callbacks = {"norms": {"_target_": "dsjob.callbacks.GradientNorms", "by": by, "every": 1}}
    model = {"_target_": "small_jobs.Net", "dropout": 0.0}
    document = make_document(folder, callbacks=callbacks, **{"model": model, **sections})
    document["data"]["shuffle"] = False
    run(document, world)


def read_first(folder: Path) -> dict[str, float]:
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    return {name.removeprefix("grad_norm/"): value for name, value in record.items() if "grad_norm/" in name}


def compute_expected(seed: int) -> dict[str, float]:
    """The norms of the first step's gradients by parameter, without dsjob."""
    seed_rng(seed)
    model, data = Net(dropout=0.0), Data()
    model(*(torch.stack(column) for column in zip(*(data[i] for i in range(8)), strict=True))).backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"gradient_clipping": 0.1}),
        (2, {"gradient_clipping": 0.1, "trainer": {"grad_accum": 2}}),
        (2, {"zero_optimization": {"stage": 1}}),
        (2, {"zero_optimization": {"stage": 2}, "trainer": {"grad_accum": 2}}),
        (2, {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.1}),
        (1, {"fp16": {"enabled": True, "initial_scale_power": 10}}),
    ],
)
@pytest.mark.full("2-sections2", "2-sections3")
def test_norms_are_those_of_autograd_before_clipping(tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    run_ranks(train, ranks, str(tmp_path), "parameter", sections)
    tolerance = 1e-2 if "fp16" in sections else 1e-5
    assert read_first(tmp_path) == pytest.approx(compute_expected(seed=42), rel=tolerance)


def test_parts_are_groups_or_blocks(tmp_path: Path) -> None:
    rules = {
        "params": {"lr": 0.01},
        "type": "AdamW",
        "param_groups": {"biases": {"match": "*bias", "weight_decay": 0.0}},
    }
    train(None, str(tmp_path / "group"), "group", {"optimizer": rules})
    expected = compute_expected(seed=42)

    def join(names: Sequence[str]) -> float:
        return float(torch.tensor([expected[name] for name in names]).norm())

    found = read_first(tmp_path / "group")
    biases = [name for name in expected if name.endswith("bias")]
    rest = [name for name in expected if name not in biases]
    assert found == pytest.approx({"rest": join(rest), "biases": join(biases)}, rel=1e-5)
    train(None, str(tmp_path / "block"), "block", {"model": {"_target_": "small_jobs.Deep"}})
    assert set(read_first(tmp_path / "block")) == {"blocks.0", "blocks.1", "rest"}


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_with_gradients_that_are_not_finite_are_named(tmp_path: Path, stage: int) -> None:
    (first, _) = run_ranks(watch_unstable, 2, str(tmp_path), stage)
    assert first == ["gradients  not finite in step 3: out.bias"]


def watch_unstable(world: World, folder: str, stage: int) -> list[str]:
    sections = {"model": {"_target_": "unstable.Unstable"}, "zero_optimization": {"stage": stage}}
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(NonFiniteLossError):
        train(world, folder, "group", sections)
    return [line for line in printed.getvalue().splitlines() if line.startswith("gradients")]


def test_arguments_are_checked() -> None:
    with pytest.raises(ContractError, match="by is 'layer'"):
        GradientNorms(by="layer")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="every is 0"):
        GradientNorms(every=0)
