"""Stages and world sizes against each other, and against plain PyTorch on the whole batch."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_engine, make_tokens, train_by_hand, train_engine, whole_state
from net import Net
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsjob.engine.engine import Engine
from dsjob.parallel import parameters
from dsjob.ranks.mesh import World

STEPS, ROWS = 3, 12


class TiedNet(Net):
    """The head shares the embedding's weight; the first block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(build_net().state_dict())
        self.head.weight = self.emb.weight
        self.blocks[0].requires_grad_(False)


def make_net(kind: str) -> nn.Module:
    return TiedNet() if kind == "tied and frozen" else build_net()


def train_stages(world: World, kind: str) -> dict[tuple[int, int], dict[str, Any]]:
    results = {}
    for stage in range(4):
        for accumulation in (1, 3):
            engine = make_engine(stage, net=make_net(kind), accumulation=accumulation)
            losses = train_engine(engine, 0, STEPS, ROWS)
            results[stage, accumulation] = {
                "weights": {n: t for n, t in whole_state(engine).items() if n.startswith("model.")},
                "losses": losses,
                "norm": engine.get_global_grad_norm(),
                "counters": engine.counters(),
                "rates": engine.get_lr(),
            }
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        (1, "plain"),
        (2, "tied and frozen"),
        (4, "plain"),
        *(
            pytest.param(*other, marks=pytest.mark.full)
            for other in ((1, "tied and frozen"), (2, "plain"), (4, "tied and frozen"))
        ),
    ],
)
@pytest.mark.full("4-plain")
def test_every_stage_gives_what_plain_pytorch_gives(world_size: int, kind: str) -> None:
    expected = train_by_hand(STEPS, ROWS, make_net(kind))
    for results in run_ranks(train_stages, world_size, kind):
        norms = [result["norm"] for result in results.values()]
        assert max(norms) - min(norms) < 1e-4
        for (stage, accumulation), result in results.items():
            assert result["counters"] == {
                "global_steps": STEPS,
                "global_samples": STEPS * 2 * accumulation * world_size,
                "micro_steps": STEPS * accumulation,
                "skipped_steps": 0,
            }
            for name, weight in expected.items():
                torch.testing.assert_close(
                    result["weights"][f"model.{name}"], weight, rtol=0, atol=2e-6, msg=f"stage {stage}: {name}"
                )


def count_bytes(world: World) -> dict[int, dict[str, int]]:
    found = {}
    for stage in range(4):
        engine = make_engine(stage)
        train_engine(engine, 0, 1, ROWS)
        state = engine.state()
        found[stage] = {
            "weights": sum(_local(t).nbytes for t in state.weights.values()),
            "optimizer": sum(_local(t).nbytes for n, t in state.optimizer_tensors().items() if "exp_avg" in n),
        }
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_masters_and_optimizer_state() -> None:
    for found in run_ranks(count_bytes, 3):
        for stage in (1, 2, 3):
            for what, whole in found[0].items():
                # 17 rows over 3 ranks: the largest share is 6/17
                assert 0.25 * whole < found[stage][what] < 0.40 * whole


class Counting(nn.Module):
    """A buffer that counts forward passes, and batch statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.own: Tensor
        self.register_buffer("own", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).square().mean() + self.fc.weight.sum()


def train_buffers(world: World) -> list[Tensor]:
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        net = Counting()
        engine = make_engine(stage, net=net)
        net.own += world.data_rank
        for step in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + world.data_rank))
            engine.backward(engine(x))
            engine.step()
        engine(torch.zeros(2, 4))  # a step begins with rank 0's buffers on every rank
        found.append(engine.state().buffers["norm.running_mean"].clone())
        assert net.own.item() == world.data_rank  # not saved, so each rank keeps its own
    return found


@pytest.mark.slow
def test_buffers_follow_rank_0_at_every_stage() -> None:
    first, second = run_ranks(train_buffers, 2)
    for stage in range(4):
        torch.testing.assert_close(first[stage], second[stage])
        torch.testing.assert_close(first[stage], first[0])


class Diverging(nn.Module):
    """Parameters that a careless program initialises differently on each rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sum()


def start_apart(world: World) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each stage and precision: the weight before and after a step, and that which the model computes with."""
    found = []
    for stage, bf16 in itertools.product(range(4), (False, True)):
        engine = make_engine(stage, net=Diverging(world.data_rank), bf16=bf16)
        before = whole_state(engine)["model.fc.weight"]
        engine.backward(engine(torch.ones(2, 5)).float())
        engine.step()
        used = engine.module.fc.weight.detach()
        whole = used.full_tensor() if isinstance(used, DTensor) else used
        found.append((before, whole_state(engine)["model.fc.weight"], whole.float()))
    return found


@pytest.mark.slow
def test_ranks_that_start_apart_agree_on_rank_0() -> None:
    expected = Diverging(0).fc.weight.detach()
    ranks = run_ranks(start_apart, 2)
    for first, second in zip(*ranks, strict=True):
        torch.testing.assert_close(first[0], expected)
        assert not torch.equal(first[0], first[1])
        for ours, theirs in zip(first, second, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(first[1], first[2], rtol=1e-2, atol=1e-2)


def train_low(world: World) -> list[set[torch.dtype]]:
    """The dtypes of weights and optimizer states of a bf16 model, for each stage and precision."""
    found = []
    for stage, bf16 in itertools.product(range(4), (False, True)):
        engine = make_engine(stage, net=build_net().bfloat16(), bf16=bf16)
        train_engine(engine, 0, 1)
        state = engine.state()
        found.append({tensor.dtype for tensor in {**state.weights, **state.optimizer_tensors()}.values()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_masters_are_fp32_whatever_the_model_comes_in(world_size: int) -> None:
    for found in run_ranks(train_low, world_size):
        assert found == [{torch.float32}] * 8


def train_sgd(world: World) -> list[dict[str, Tensor]]:
    found = []
    for stage in range(4):
        engine = make_engine(stage, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
        train_engine(engine, 0, 3)
        found.append({n: t for n, t in whole_state(engine).items() if n.startswith("model.")})
    return found


@pytest.mark.slow
def test_sgd_is_the_same_at_every_stage() -> None:
    for found in run_ranks(train_sgd, 2):
        for weights in found:
            for name, tensor in found[0].items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)


def take_step(engine: Engine) -> tuple[float, float]:
    """The loss and the norm of a step of two micro steps."""
    for _ in range(2):
        loss = engine(*make_tokens(5, 2))
        engine.backward(loss)
        engine.step()
    return float(loss.detach()), engine.get_global_grad_norm()


def break_off(world: World, folder: str) -> list[tuple[float, float, float, float]]:
    """For each stage: a loss and the norm of a step, of a fresh engine and of one that loads within a step."""
    found = []
    for stage, bf16 in enumerate((False, True, True, False)):
        engine = make_engine(stage, accumulation=2, bf16=bf16, communication_data_type="fp32")
        engine.save_checkpoint(f"{folder}/{stage}-{bf16}")

        expected = take_step(engine)
        engine.backward(engine(*make_tokens(5, 2)))
        engine.step()
        engine.load_checkpoint(f"{folder}/{stage}-{bf16}")
        found.append((*expected, *take_step(engine)))
    return found


@pytest.mark.slow
def test_loading_within_a_step_drops_what_it_has_added_up(tmp_path: Path) -> None:
    for found in run_ranks(break_off, 2, str(tmp_path)):
        for loss, norm, again, norm_again in found:
            assert again == pytest.approx(loss, rel=1e-6)
            assert norm_again == pytest.approx(norm, rel=1e-5)


class Averaging(nn.Module):
    """A running average that is replaced, not written into."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return (self.fc(x) - self.average).square().mean()


def train_averaging(world: World) -> list[list[float]]:
    found = []
    for stage in range(4):
        engine = make_engine(stage, net=Averaging())
        seen = []
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4) * (world.data_rank + 1)))
            engine.step()
            seen.append(float(engine.module.average[0]))
        found.append(seen)
    return found


@pytest.mark.slow
def test_a_buffer_that_is_replaced_follows_rank_0_too() -> None:
    first, second = run_ranks(train_averaging, 2)
    for stage in range(4):
        assert first[stage] == pytest.approx([0.1, 0.19, 0.271])
        assert second[stage] == pytest.approx([0.2, 0.29, 0.371])


class Unused(nn.Module):
    """A part that no forward pass uses, and one that only every other uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.used(x)
        return (self.sometimes(x) if self.calls % 2 else x).square().mean()


def train_unused(world: World) -> list[dict[str, Tensor]]:
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        engine = make_engine(stage, net=Unused())
        for step in range(4):
            engine.backward(engine(torch.ones(2, 4) * (step + world.data_rank)))
            engine.step()
        found.append({n: t for n, t in whole_state(engine).items() if n.startswith("model.")})
    return found


@pytest.mark.slow
def test_parameters_without_gradient_stay_as_they_are_at_every_stage() -> None:
    torch.manual_seed(0)
    expected = Unused().never.weight
    for found in run_ranks(train_unused, 2):
        for weights in found:
            torch.testing.assert_close(weights["model.never.weight"], expected.detach(), rtol=0, atol=0)
            for name, tensor in found[0].items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)


def train_reducing_in(world: World, dtype: str | None) -> list[list[float]]:
    config = {"communication_data_type": dtype} if dtype else {}
    return [train_engine(make_engine(stage, bf16=True, **config), 0, STEPS, ROWS) for stage in (0, 2)]


@pytest.mark.slow
def test_gradients_may_travel_in_a_dtype_of_their_own_at_every_stage() -> None:
    plain, reduced = (run_ranks(train_reducing_in, 2, dtype) for dtype in (None, "fp32"))
    for rank in range(2):
        for stage in range(2):
            assert reduced[rank][stage] == pytest.approx(plain[rank][stage], rel=4e-3)


def read_gradients(engine: Engine, times: int) -> dict[str, Tensor]:
    """The first parameter's gradient `times`; that it can be doubled."""
    engine.backward(engine(*make_tokens(engine.global_rank, 2)))
    weight = next(engine.module.parameters())
    before = parameters.safe_get_full_grad(weight)
    assert before is not None
    parameters.safe_set_full_grad(weight, 2 * before)
    torch.testing.assert_close(parameters.safe_get_full_grad(weight), 2 * before)
    return {"gradient": before * times}


def train_summed(world: World) -> list[list[dict[str, Tensor]]]:
    """For each stage: weights after steps of SGD on summed gradients, and on averaged ones at W times the rate; then
    a summed gradient as a program reads and changes it, beside W averaged ones."""
    found = []
    for stage in range(4):
        pair = []
        for op, rate in (("sum", 0.1), ("mean", 0.1 * world.data_size)):
            sgd = {"type": "SGD", "params": {"lr": rate}}
            engine = make_engine(stage, optimizer=sgd, gradient_clipping=0, gradient_allreduce_op=op)
            train_engine(engine, 0, 2)
            pair.append({n: t for n, t in whole_state(engine).items() if n.startswith("model.")})
            pair[-1].update(read_gradients(engine, 1 if op == "sum" else world.data_size))
        found.append(pair)
    return found


@pytest.mark.slow
@pytest.mark.full
def test_gradients_may_be_summed_over_ranks_at_every_stage() -> None:
    for found in run_ranks(train_summed, 3):
        for summed, averaged in found:
            for name, weight in averaged.items():
                torch.testing.assert_close(summed[name], weight, rtol=0, atol=1e-6)
