"""What one rank does alone: `if rank == 0: torch.save(engine.module.state_dict(), ...)`, or an evaluation there."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import dsjob
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from dsjob import deepspeed, initialize
from dsjob.errors import UsageError
from dsjob.parallel.zero import GatheredParameters
from dsjob.ranks.joint import Meetings
from dsjob.ranks.mesh import World
from dsjob.torch_private import get_store

PROGRAM = """
import sys, dsjob.ranks.patience; dsjob.ranks.patience.TO_BE_SURE = 1.5
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


@pytest.mark.parametrize(("stage", "then"), [("3", "train"), ("3", "end")])
@pytest.mark.full("3-end")
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
        pytest.param("0", "train", SAVE, "engine.save_checkpoint()", marks=pytest.mark.full),
        ("3", "end", SAVE, "engine.save_checkpoint()"),
        pytest.param(
            *("0", "end", "engine.load_checkpoint('saved')", "engine.load_checkpoint()"), marks=pytest.mark.full
        ),
        pytest.param(
            *("1", "barrier", "engine.save_16bit_model('saved')", "engine.save_16bit_model()"), marks=pytest.mark.full
        ),
        ("2", "end", "engine.module_state_dict()", "engine.module_state_dict()"),
        pytest.param("3", "train", GATHER, "GatheredParameters", marks=pytest.mark.full),
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


class Tied(torch.nn.Module):
    """Two blocks, a tied head, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(self.scale * self.norm(hidden))


def work_alone(world: World, stage: int, bf16: bool) -> dict[str, Any]:
    """Trains; after each step, rank 0 alone evaluates the model and keeps its state, as BingBert's SQuAD loop does."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine = deepspeed.initialize(model=Tied(), config=config)[0]
    found: dict[str, Any] = {"states": [], "outputs": [], "losses": []}
    ids = torch.arange(4) + world.data_rank
    for step in range(7):
        engine.empty_partition_cache()  # programs call it at any stage; it frees what stage 3 has gathered
        if world.data_rank == 0 and step % 2 == 0:
            engine.eval()
            with torch.no_grad():
                found["outputs"].append(engine(torch.arange(5)).float())
            found["states"].append(deepcopy(engine.module.state_dict()))  # without ZeRO, it shares the model's memory
            assert all(not isinstance(value, DTensor) for value in found["states"][-1].values())
            engine.train()
        loss = engine(ids % 5).float().square().mean()
        engine.backward(loss)
        engine.step()
        found["losses"].append(loss.item())
    state = engine.module.state_dict()
    found["tied"] = state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    found["states"].append(state)  # in the middle of a step, on all ranks
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.full("1-False", "2-False")
def test_below_stage_3_one_rank_may_call_the_model_and_read_its_state(stage: int, bf16: bool) -> None:
    first, second = run_ranks(work_alone, 2, stage, bf16)
    plain, _ = run_ranks(work_alone, 2, 0, bf16)
    tolerance = {"rtol": 0.05, "atol": 0.02} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.tensor(first["losses"]), torch.tensor(plain["losses"]), **tolerance)
    for own, whole in zip(first["outputs"], plain["outputs"], strict=True):
        torch.testing.assert_close(own, whole, **tolerance)
    for own, whole in zip(first["states"], plain["states"], strict=True):
        assert list(own) == list(whole)
        for name, value in own.items():
            torch.testing.assert_close(value.float(), whole[name].float(), **tolerance)
    assert first["tied"]
    assert not torch.equal(first["states"][0]["layers.0.weight"], first["states"][1]["layers.0.weight"])
    parameters = dict(Tied().named_parameters())  # running statistics are each rank's own until the next step
    for name, value in ((name, first["states"][-1][name]) for name in parameters):
        torch.testing.assert_close(value, second["states"][-1][name], rtol=0, atol=0)


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


def meet_often(world: World) -> list[bool]:
    meetings = Meetings(world)
    for _ in range(3):
        meetings.meet("it()", "call it on all ranks")
    dist.barrier()
    number = meetings._number
    return [get_store().check([f"dsjob/meet/0/{number}/it()/{call}"]) for call in (1, 2, 3)]


def test_meetings_leave_one_key_in_the_store() -> None:
    assert run_ranks(meet_often, 2) == [[False, False, True]] * 2


def test_ranks_may_be_late_or_have_gathered_before() -> None:
    (first, error), (second, _) = run_ranks(call_unequally, 2)
    assert (first, second) == (["weight", "bias"] * 2, ["weight", "bias"])
    assert "not all ranks call it(): another rank did not within" in error
