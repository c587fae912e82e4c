"""Averages of weights: their values, at every stage; resumed bit for bit, converted, and used in evaluations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_jobs import Data, Net, make_document, read_digests, read_losses, run
from torch import Tensor

from dsjob.callbacks import EMA
from dsjob.checkpoint.format import zero_to_fp32
from dsjob.checkpoint.offline.convert import convert, read_weights
from dsjob.errors import ContractError, UsageError
from dsjob.ranks.mesh import World

EVAL = {"_target_": "small_jobs.Data", "n": 12}


def averaged(folder: str, steps: int, stage: int = 0, **arguments: Any) -> dict[str, Any]:
    ema = {"_target_": "dsjob.callbacks.EMA", "decay": 0.8, **arguments}
    return make_document(
        folder,
        data={"train": {"_target_": "small_jobs.Data"}, **({"eval": EVAL} if "evaluate" in arguments else {})},
        trainer={"max_steps": steps},
        callbacks={"ema": ema},
        checkpoint={"every": 1, "keep": 0},
        zero_optimization={"stage": stage},
        bf16={"enabled": stage == 2},
        scheduler=None,
        optimizer={"type": "AdamW", "params": {"lr": 0.05}},
    )


def average_on_ranks(world: World, folder: str, steps: int, stage: int, arguments: dict[str, Any]) -> None:
    run(averaged(folder, steps, stage, **arguments), world)


def read_average(folder: Path, step: int) -> dict[str, Tensor]:
    out = folder / f"ema-{step}.bin"
    convert(str(folder), str(out), to="fp32", tag=f"step-{step:08d}", ema=True, overwrite=True)
    found: dict[str, Tensor] = torch.load(out)
    return found


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(1, 0), (2, 0), (2, 3), *(pytest.param(2, stage, marks=pytest.mark.full) for stage in (1, 2))],
)
@pytest.mark.full("2-0", "2-3")
def test_averages_follow_the_weights_and_are_resumed_bit_for_bit(tmp_path: Path, ranks: int, stage: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(average_on_ranks, ranks, str(whole), 6, stage, {})
    for step in range(2, 7):
        weights = read_weights(str(whole), tag=f"step-{step:08d}")
        before, after = read_average(whole, step - 1), read_average(whole, step)
        assert weights.keys() == after.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(after[name], 0.8 * before[name] + 0.2 * weight.float())
            assert not torch.equal(after[name], weight)
    for steps in (3, 6):
        run_ranks(average_on_ranks, ranks, str(parts), steps, stage, {})
    digests = read_digests(whole, 6)
    assert "optimizer.fc.weight.ema" in digests
    assert read_digests(parts, 6) == digests


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), pytest.param(2, 2, marks=pytest.mark.full), (2, 3)])
@pytest.mark.full("2-3")
def test_evaluations_use_the_averages_if_asked(tmp_path: Path, ranks: int, stage: int) -> None:
    losses = {}
    for evaluate in (False, True):
        folder = tmp_path / str(evaluate)
        run_ranks(average_on_ranks, ranks, str(folder), 4, stage, {"evaluate": evaluate})
        average = Net(dropout=0.0)
        average.load_state_dict(read_average(folder, 4))
        data = Data(12)
        expected = float(average(data.x, data.x.sum(1, keepdim=True)))
        loss = json.loads((folder / "result.json").read_text())["metrics"]["eval/loss"]
        assert (abs(loss - expected) < 0.01 * expected) == evaluate
        losses[evaluate] = read_losses(folder)
    assert losses[True] == losses[False]


def test_the_script_in_a_checkpoint_writes_the_averages(tmp_path: Path) -> None:
    run(averaged(str(tmp_path), 2))
    script = [sys.executable, "-I", "-S", str(tmp_path / "checkpoints" / "zero_to_fp32.py")]
    subprocess.run([*script, "--ema", str(tmp_path / "checkpoints"), str(tmp_path / "ema.bin")], check=True)
    written, expected = torch.load(tmp_path / "ema.bin"), read_average(tmp_path, 2)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], average) for name, average in expected.items())
    assert zero_to_fp32.main([str(tmp_path / "checkpoints"), str(tmp_path / "weights.bin")]) == 0
    assert not torch.equal(torch.load(tmp_path / "weights.bin")["fc.weight"], written["fc.weight"])


def test_a_run_without_the_callback_drops_the_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(averaged(str(tmp_path), 2))
    run(averaged(str(tmp_path), 4) | {"callbacks": {}})
    assert not [name for name in read_digests(tmp_path, 4) if name.endswith(".ema")]
    with pytest.raises(UsageError, match="contains no averages"):
        read_average(tmp_path, 4)
    assert zero_to_fp32.main([str(tmp_path / "checkpoints"), str(tmp_path / "ema.bin"), "--ema"]) == 2
    assert "contains no averages of weights (train with the callback" in capsys.readouterr().err


def test_averages_that_begin_in_a_resumed_run_start_at_its_weights(tmp_path: Path) -> None:
    run(averaged(str(tmp_path), 2) | {"callbacks": {}})
    run(averaged(str(tmp_path), 3))
    before, weights = (read_weights(str(tmp_path), tag=f"step-0000000{step}") for step in (2, 3))
    for name, average in read_average(tmp_path, 3).items():
        torch.testing.assert_close(average, 0.8 * before[name] + 0.2 * weights[name])


def test_averages_that_no_callback_keeps_are_missed_before_the_first_step(tmp_path: Path) -> None:
    document = averaged(str(tmp_path), 2, evaluate=False)
    document["callbacks"] = {"hooks": {"_target_": "small_jobs.Hooks"}}
    document["checkpoint"] = {"ema": True, "load_best_at_end": True, "best": {}}
    with pytest.raises(ContractError, match=r"checkpoint\.ema is set, but no callback keeps averages") as caught:
        run(document)
    assert caught.value.path == ("checkpoint", "ema")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_decay_out_of_range_is_refused() -> None:
    with pytest.raises(ContractError, match=r"decay is 1\.0"):
        EMA(1.0)
