"""Calls on one rank only that all ranks must make, such as `if rank == 0: engine.save_checkpoint(...)`."""

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
from dsjob.ranks.joint import Meetings
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
    CALL
if sys.argv[2] == "train":
    train()
if sys.argv[2] == "barrier":
    torch.distributed.barrier()
"""
SAVE = "engine.save_checkpoint('saved')"
GATHER = "with deepspeed.zero.GatheredParameters(list(engine.module.parameters())): pass"


def call_alone(folder: Path, stage: str, then: str, call: str) -> str:
    """What a user sees of two ranks, of which the first makes the call alone."""
    (folder / "train.py").write_text(PROGRAM.replace("CALL", call))
    began = time.monotonic()
    done = dsjob("exec", "--num_gpus", "2", "--no_local_rank", "train.py", stage, then, cwd=folder)
    assert time.monotonic() - began < 60  # not the timeout of a collective
    assert "train.py:19" in done.stderr
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize(("stage", "then"), [("3", "train"), ("1", "end")])
def test_the_rank_that_calls_alone_gets_an_error_that_names_the_other_ways(
    tmp_path: Path, stage: str, then: str
) -> None:
    told = call_alone(tmp_path, stage, then, "torch.save(engine.module.state_dict(), 'model.pt')")
    does = "went on to something else" if then == "train" else "ended"
    assert f"rank 0: not all ranks call state_dict() of a sharded model: rank 1 {does}\n" in told
    for name in ("save_16bit_model", "deepspeed.zero.GatheredParameters", "_zero3_consolidated_16bit_state_dict"):
        assert name in told


@pytest.mark.parametrize(
    ("stage", "then", "call", "what"),
    [
        ("0", "train", SAVE, "engine.save_checkpoint()"),
        ("3", "end", SAVE, "engine.save_checkpoint()"),
        ("0", "end", "engine.load_checkpoint('saved')", "engine.load_checkpoint()"),
        ("1", "barrier", "engine.save_16bit_model('saved')", "engine.save_16bit_model()"),
        ("2", "end", "engine.module_state_dict()", "engine.module_state_dict()"),
        ("3", "train", GATHER, "GatheredParameters"),
    ],
)
def test_saving_on_one_rank_is_an_error_that_says_to_call_it_on_all(
    tmp_path: Path, stage: str, then: str, call: str, what: str
) -> None:
    told = call_alone(tmp_path, stage, then, call)
    assert (
        f"rank 0: not all ranks call {what}: rank 1 {'ended' if then == 'end' else 'went on to something else'}\n"
        in told
    )
    assert "every rank must" in told
    assert "`if rank == 0:`" in told


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
        with pytest.raises(UsageError) as caught:
            Meetings(replace(world, timeout=0.5)).meet("it()", "call it on all ranks")
        error = str(caught.value)
    return found, error


def test_ranks_may_be_late_or_have_gathered_before() -> None:
    (first, error), (second, _) = run_ranks(call_unequally, 2)
    assert (first, second) == (["weight", "bias"] * 2, ["weight", "bias"])
    assert "not all ranks call it(): another rank did not within" in error
