"""bf16 masters: weights, gradients and the optimizer's state are bf16, and steps compute in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_config, make_tokens
from job_documents import find_problems, make_job
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.optim.shards import local, whole
from dsjob.planning.memory import predict_memory
from dsjob.planning.model import Layout, OptimizerState
from dsjob.ranks.mesh import World
from dsjob.training.probe import size_model

LOW, STEPS = torch.bfloat16, 6
RATE: dict[str, Any] = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}


def make_engine(stage: int, offload: str, *, low_state: bool, **more: Any) -> Engine:
    section = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": low_state}
    where = {f"offload_{offload}": {"device": "cpu"}} if offload else {}
    config = make_config(stage, bf16=section, gradient_clipping=0.5, **more)
    return dsjob.initialize(model=build_net(), config={**config, "zero_optimization": {"stage": stage, **where}})[0]


def train(engine: Engine, first: int = 0, steps: int = STEPS) -> list[float]:
    """Losses. All ranks read the same batches, so their mean gradients are those of one rank, bit for bit."""
    losses = []
    for step in range(first, first + steps):
        for _ in range(engine.rhythm.accumulation):
            loss = compute(engine, step)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def compute(model: Any, step: int) -> Tensor:
    loss: Tensor = model(*make_tokens(step, 2))
    return loss


def train_by_hand(*, low_state: bool, clip: float = 0.5) -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain PyTorch: AdamW steps fp32 copies of everything, which are then rounded."""
    model = build_net().to(LOW)
    optimizer = torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in model.parameters()], **RATE)
    wide, losses = optimizer.param_groups[0]["params"], []
    for step in range(STEPS):
        loss = compute(model, step)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = [p.grad for p in model.parameters()]
        norm = torch.stack([g.float().norm() for g in gradients if g is not None]).norm()  # type: ignore[union-attr]
        for copy, parameter in zip(wide, model.parameters(), strict=True):
            assert parameter.grad is not None
            copy.grad = (parameter.grad * (clip / (norm + 1e-6)).clamp(max=1.0)).float()
        optimizer.step()
        for copy, parameter in zip(wide, model.parameters(), strict=True):
            parameter.data.copy_(copy.data)
            copy.data.copy_(parameter.data)
            parameter.grad = None
            for key in ("exp_avg", "exp_avg_sq") if low_state else ():
                optimizer.state[copy][key] = optimizer.state[copy][key].to(LOW).float()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def run_cells(world: World, cells: list[tuple[int, str, bool]]) -> list[Any]:
    found = []
    for stage, offload, low_state in cells:
        engine = make_engine(stage, offload, low_state=low_state)
        losses = train(engine)
        kinds = {master.dtype for master in engine.strategy.masters.values()}
        assert engine.optimizer is not None
        state = {
            value.dtype for entry in engine.optimizer.state.values() for key, value in entry.items() if key != "step"
        }
        weights = {name: whole(value.detach()).clone() for name, value in engine.strategy.weights().items()}
        found.append((losses, weights, kinds, state))
    return found


CELLS = [(1, "", True), (2, "optimizer", True), (3, "", False), (3, "param", True)]
MORE = [(s, o, low) for s in (0, 1, 2, 3) for o in ("", "optimizer") for low in (True, False) if s or not o]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE, marks=pytest.mark.full)])
def test_steps_are_those_of_fp32_rounded_once(ranks: int, cells: list[tuple[int, str, bool]]) -> None:
    for rank in run_ranks(run_cells, ranks, cells):
        for (stage, offload, low_state), (losses, weights, kinds, state) in zip(cells, rank, strict=True):
            expected, final = train_by_hand(low_state=low_state)
            where = f"stage {stage} {offload} {low_state}"
            assert losses == pytest.approx(expected, rel=1e-3), where
            assert kinds == {LOW}, where
            assert state == {LOW if low_state else torch.float32}, where
            for name, weight in final.items():
                torch.testing.assert_close(weights[name], weight, rtol=0.02, atol=4e-3, msg=f"{where} {name}")


def resume(world: World, folder: str, low_state: bool) -> tuple[list[float], list[float]]:
    engine = make_engine(2, "", low_state=low_state, accumulation=2)
    train(engine, 0, 3)
    engine.save_checkpoint(folder, "three")
    straight = train(engine, 3, 3)
    again = make_engine(2, "", low_state=low_state, accumulation=2)
    again.load_checkpoint(folder, "three")
    return straight, train(again, 3, 3)


@pytest.mark.parametrize("low_state", [True, False])
def test_a_checkpoint_holds_bf16_and_resumes_bit_for_bit(tmp_path: Path, low_state: bool) -> None:
    for straight, again in run_ranks(resume, 2, str(tmp_path), low_state):
        assert again == straight
    read = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "three")
    assert {value.dtype for value in read.values()} == {torch.float32}
    assert all(torch.equal(value, value.to(LOW).float()) for value in read.values())


def count(world: World, stage: int, offload: str, low_state: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of masters and of the optimizer's state on this rank, and what `dsjob plan` predicts."""
    engine = make_engine(stage, offload, low_state=low_state)
    train(engine, 0, 2)
    assert engine.optimizer is not None
    masters = sum(local(master.data).nbytes for master in engine.strategy.masters.values())
    values = [value for entry in engine.optimizer.state.values() for value in entry.values()]
    live = {"masters": masters, "optimizer state": sum(local(value).nbytes for value in values)}
    with torch.device("meta"):
        model = size_model(build_net())
    sizes: Any = {"master": 2, "state": 2 if low_state else 4, "offload": offload or "none"}
    state = OptimizerState(2, 4)
    memory = predict_memory(model, Layout(stage, world.data_size, 2, 2, **sizes), state, rank=world.data_rank)
    found = {item.name: item.step for item in memory.items}
    kept = "masters" if offload == "optimizer" else "parameters"
    return live, {"masters": found[kept], "optimizer state": found["optimizer state"]}


@pytest.mark.parametrize(("stage", "offload"), [(2, ""), (1, "optimizer")])
@pytest.mark.parametrize("low_state", [True, False])
def test_a_plan_predicts_their_memory(stage: int, offload: str, low_state: bool) -> None:
    live, predicted = run_ranks(count, 2, stage, offload, low_state)[0]
    assert live == predicted


class Norms(torch.optim.Optimizer):
    """Some user's optimizer."""

    def step(self, closure: Any = None) -> None:
        """Does nothing."""


def test_what_cannot_step_bf16_masters_is_refused() -> None:
    section = {"enabled": True, "bf16_master_weights_and_grads": True}
    config = make_config(1, bf16=section)
    with pytest.raises(UsageError, match="Norms would see only this rank's parts"):
        dsjob.initialize(model=build_net(), config=config, optimizer=lambda parameters: Norms(parameters, {}))
    disk = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    (problem,) = find_problems(make_job(bf16=section, zero_optimization=disk))
    assert "cannot be combined with state on a disk" in problem.message
    (problem,) = find_problems(make_job(bf16={**section, "enabled": False}))
    assert "needs bf16.enabled" in problem.message
