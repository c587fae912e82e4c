"""`state_dict()` of a sharded model on one rank only: `if rank == 0: torch.save(engine.module.state_dict(), ...)`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import dsjob
from ranks import run_ranks

from dsjob import initialize
from dsjob.errors import UsageError
from dsjob.parallel.zero import GatheredParameters
from dsjob.ranks.mesh import World

PROGRAM = """
import sys, time
import deepspeed, torch

torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": int(sys.argv[1])},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 2), config=config)

def train():
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()

train()
if engine.global_rank == 0:
    torch.save(engine.module.state_dict(), "model.pt")
if sys.argv[2] == "train":
    train()
"""


@pytest.mark.parametrize(("stage", "then"), [("3", "train"), ("1", "end")])
def test_the_rank_that_calls_alone_gets_an_error_that_names_the_other_ways(
    tmp_path: Path, stage: str, then: str
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    began = time.monotonic()
    done = dsjob("exec", "--num_gpus", "2", "--no_local_rank", "train.py", stage, then, cwd=tmp_path)
    assert time.monotonic() - began < 60  # not the timeout of a collective
    does = "does something else" if then == "train" else "has ended"
    assert f"rank 0: not all ranks call state_dict() of a sharded model: rank 1 {does}\n" in done.stderr
    for name in ("save_16bit_model", "deepspeed.zero.GatheredParameters", "_zero3_consolidated_16bit_state_dict"):
        assert name in done.stderr
    assert "train.py:19" in done.stderr
    assert done.returncode == 2


def call_unequally(world: World) -> tuple[list[str], str]:
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    model = initialize(model=torch.nn.Linear(4, 2), config=config)[0].module
    time.sleep(0.5 * world.data_rank)  # a late rank is no error
    found = list(model.state_dict())
    with GatheredParameters(list(model.parameters())):
        if world.data_rank == 0:
            found += list(model.state_dict())
    error = ""
    if world.data_rank == 0:
        from dsjob.ranks.joint import meet

        with pytest.raises(UsageError) as caught:
            meet(replace(world, timeout=0.5), "alone", "it()", "call it on all ranks")
        error = str(caught.value)
    return found, error


def test_ranks_may_be_late_or_have_gathered_before() -> None:
    (first, error), (second, _) = run_ranks(call_unequally, 2)
    assert (first, second) == (["weight", "bias"] * 2, ["weight", "bias"])
    assert "not all ranks call it(): another rank does something else" in error
