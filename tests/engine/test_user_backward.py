"""Backward passes that the program starts itself: on real ranks, at any stage, the weights of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import build_net, make_tokens, train_by_hand, whole_state
from engines import make_deepspeed_engine as make_engine
from ranks import run_ranks
from torch import Tensor, nn

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed import DeepSpeedEngine
from dsjob.errors import UsageError
from dsjob.parallel.parameters import safe_get_full_grad, safe_update_full_grad_vectorized
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow

ROWS, STEPS = 12, 3
Way = Callable[[DeepSpeedEngine, list[tuple[Tensor, Tensor]]], None]
FP16 = {"enabled": True, "initial_scale_power": 6}


def by_engine(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        engine.backward(engine(x, y))
        engine.step()


def by_user(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        engine.scale(engine(x, y)).backward()
        engine.step()


def two_passes_then_one_backward(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        half = len(x) // 2
        losses = [engine(x[:half], y[:half]), engine(x[half:], y[half:])]
        engine.scale((losses[0] + losses[1]) / 2).backward()
        engine._backward_epilogue()
        engine.step()


def two_passes_then_two_backwards(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        half = len(x) // 2
        losses = [engine(x[:half], y[:half]), engine(x[half:], y[half:])]
        for loss in losses:
            engine.backward(loss / 2)
        engine.step()


def one_pass_then_two_backwards(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        loss = engine(x, y)
        engine.backward(loss / 4, retain_graph=True)
        engine.backward(loss * 3 / 4)
        engine.step()


def one_pass_then_two_by_user(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        loss = engine.scale(engine(x, y))
        (loss / 4).backward(retain_graph=True)
        (loss * 3 / 4).backward()
        engine.step()


def without_sync(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        half = len(x) // 2
        with engine.no_sync():
            engine.backward(engine(x[:half], y[:half]) / 2)
        engine.backward(engine(x[half:], y[half:]) / 2)
        engine.step()


def coalesced(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in parts:
        half = len(x) // 2
        with engine.coalesce_grad_reduction():
            engine.backward(engine(x[:half], y[:half]) / 2)
            engine.backward(engine(x[half:], y[half:]) / 2)
        engine.step()


def boundary_moved_after_forward(engine: DeepSpeedEngine, parts: list[tuple[Tensor, Tensor]]) -> None:
    """As accelerate drives it: the boundary is known when backward begins."""
    engine.set_gradient_accumulation_boundary(False)
    for number, (x, y) in enumerate(parts, start=1):
        loss = engine(x, y)
        engine.set_gradient_accumulation_boundary(number == len(parts))
        engine.backward(loss)
        engine.step()
        engine.set_gradient_accumulation_boundary(False)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        by_engine,
        by_user,
        two_passes_then_one_backward,
        two_passes_then_two_backwards,
        one_pass_then_two_backwards,
        one_pass_then_two_by_user,
        without_sync,
        coalesced,
        boundary_moved_after_forward,
    )
}


def train(engine: DeepSpeedEngine, way: Way) -> dict[str, Tensor]:
    world, accumulation = engine.world, engine.gradient_accumulation_steps()
    part = ROWS // world.data_size // accumulation
    for step in range(STEPS):
        x, y = make_tokens(step, ROWS)
        starts = [(micro * world.data_size + world.data_rank) * part for micro in range(accumulation)]
        way(engine, [(x[start : start + part], y[start : start + part]) for start in starts])
    assert engine.global_steps == STEPS
    return whole_state(engine)


def train_every_way(world: World, stage: int, accumulation: int, fp16: bool) -> dict[str, dict[str, Tensor]]:
    options: dict[str, Any] = {"fp16": FP16} if fp16 else {}
    config = {"train_micro_batch_size_per_gpu": ROWS // world.data_size // accumulation, **options}
    return {name: train(make_engine(stage, accumulation=accumulation, **config), way) for name, way in WAYS.items()}


def weights_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [
        *((0, 1), (1, 3), (2, 1), (3, 3)),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((0, 3), (1, 1), (2, 3), (3, 1))),
    ],
)
@pytest.mark.full("1-3", "3-3")
def test_every_way_trains_as_a_loop_by_hand(stage: int, accumulation: int) -> None:
    expected = train_by_hand(STEPS)
    for result in run_ranks(train_every_way, 2, stage, accumulation, False):
        for way, state in result.items():
            weights = weights_of(state)
            for name, tensor in expected.items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=f"{way}: {name}")


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.full)])
def test_every_way_trains_in_fp16(stage: int) -> None:
    expected = train_by_hand(STEPS)
    for result in run_ranks(train_every_way, 2, stage, 3, True):
        for way, state in result.items():
            for name, tensor in expected.items():
                # Adam makes a whole step of a small gradient, whatever its rounding: only the mean tells.
                assert (weights_of(state)[name] - tensor).abs().mean() < 1e-3, f"{way}: {name}"


def test_every_way_trains_alone() -> None:
    expected = train_by_hand(STEPS)
    for way in WAYS.values():
        weights = weights_of(train(make_engine(2, accumulation=2, train_micro_batch_size_per_gpu=6), way))
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6)


class Pair(nn.Module):
    """Gives a loss, and what it has computed the loss from."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.linear(x)
        return outputs.square().mean(), outputs


def train_together(world: World, stages: tuple[int, int]) -> list[Tensor]:
    """Two engines on one loss, as DeepSpeed's documentation shows it."""
    engines = []
    for number, stage in enumerate(stages):
        torch.manual_seed(number)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
        }
        engines.append(deepspeed.initialize(model=Pair(), config=config)[0])
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        losses = [engine(x[2 * world.data_rank : 2 * world.data_rank + 2])[0] for engine in engines]
        loss = sum(loss / (i + 1) for i, loss in enumerate(losses))
        loss.backward()  # type: ignore[union-attr]
        for engine in engines:
            engine._backward_epilogue()
        for engine in engines:
            engine.step()
        for engine in engines:
            engine.optimizer.zero_grad()  # type: ignore[union-attr]
    return [whole_state(engine)["model.linear.weight"] for engine in engines]


@pytest.mark.parametrize("stages", [(0, 3), (1, 2), (3, 3)])
def test_engines_train_together_on_one_loss(stages: tuple[int, int]) -> None:
    expected = []
    for number in range(2):
        torch.manual_seed(number)
        net = Pair()
        for step in range(3):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            net.zero_grad()
            (net(x)[0] / (number + 1)).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        expected.append(net.linear.weight.detach())
    for weights in run_ranks(train_together, 2, stages):
        torch.testing.assert_close(weights, expected)


def test_an_output_that_another_one_is_computed_from_is_divided_once() -> None:
    def gradient(accumulation: int) -> Tensor:
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
        engine = deepspeed.initialize(model=Pair(), config=config)[0]
        loss, outputs = engine(torch.ones(2, 4))
        (loss + outputs.sum()).backward()
        return engine.module.linear.weight.grad  # type: ignore[union-attr,return-value]

    torch.testing.assert_close(gradient(4) * 4, gradient(1))


def test_a_loss_that_is_not_scaled_is_refused_in_fp16() -> None:
    engine = make_engine(0, fp16=FP16)
    x, y = make_tokens(0, 2)
    with pytest.raises(UsageError, match="Loss scaling is required"):
        engine(x, y).backward()
    engine.scale(engine(x, y)).backward()
    engine.step()
    assert engine.was_step_applied()
    with pytest.raises(UsageError, match="scalar tensor, but has shape"):
        engine.scale(torch.zeros(2))


def test_a_step_may_not_be_taken_without_sync() -> None:
    engine = make_engine(0)
    with engine.no_sync():
        with pytest.raises(UsageError, match="inside no_sync"):
            engine.step()
        with pytest.raises(UsageError, match="cannot be nested"), engine.no_sync():
            pass


def test_the_caller_may_divide_the_loss() -> None:
    grads = []
    for divides in (True, False):
        engine = make_engine(0, accumulation=3)
        loss = engine(*make_tokens(0, 2))
        returned = engine.backward(loss if divides else loss / 3, scale_wrt_gas=divides)
        assert returned.item() == pytest.approx(loss.item() / 3)
        grads.append(build_net() and engine.module.head.weight.grad)  # type: ignore[union-attr]
    torch.testing.assert_close(grads[0], grads[1])


class Heads(nn.Module):
    """A loss, logits that it is not computed from, and an output that nobody uses; it remembers the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.spare = nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        self.seen = self.head(x)
        return {"loss": x.square().mean(), "logits": self.seen, "spare": self.spare(x)}


def change_in_place(world: World, accumulation: int) -> dict[str, Tensor]:
    engine = make_engine(0, net=Heads(), accumulation=accumulation, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    for _ in range(2 * accumulation):
        outputs = engine(torch.ones(2, 3))
        assert outputs["logits"].data_ptr() == engine.module.seen.data_ptr()  # not copied
        outputs["logits"] *= 2
        loss = outputs["loss"]
        loss += outputs["logits"].sum()
        engine.backward(loss)
        engine.step()
    return whole_state(engine)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_outputs_may_be_changed_in_place_and_left_alone(accumulation: int) -> None:
    (alone,) = run_ranks(change_in_place, 1, accumulation)
    for rank in run_ranks(change_in_place, 2, accumulation):
        assert rank.keys() == alone.keys()
        assert all(torch.allclose(rank[name], value, atol=1e-6) for name, value in alone.items())


def read_own_gradients(world: World, op: str) -> list[tuple[bool, bool, bool, bool, bool]]:
    """For each stage: what is read inside no_sync is this rank's own sum; what is after it is the mean.

    Both are times the ranks where their sum is asked for. Then: what is written all at once, inside and after.
    """
    found, factor = [], 2 if op == "sum" else 1
    for stage in range(4):
        engine = make_engine(stage, gradient_allreduce_op=op)
        weight = engine.module.head.weight  # type: ignore[union-attr]
        assert isinstance(weight, Tensor)
        own = []
        written: list[Tensor] = []

        def change(gradient: Tensor, parameter: Tensor, written: list[Tensor] = written) -> Tensor:
            written.append(gradient)
            return gradient

        with engine.no_sync():
            for micro in range(2):
                engine.backward(engine(*make_tokens(10 * micro + world.data_rank, 2)))
                own.append(safe_get_full_grad(weight))
            safe_update_full_grad_vectorized([weight], change)
        inside = len(written) == (stage == 0)  # where the gradient itself is what is there
        engine.allreduce_gradients()
        mean = safe_get_full_grad(weight)
        assert own[1] is not None
        assert mean is not None
        sums = own[1].clone()
        dist.all_reduce(sums)
        plain = build_net()
        for micro in range(2):
            plain(*make_tokens(10 * micro + world.data_rank, 2)).backward()
        expected = plain.head.weight.grad * factor
        safe_update_full_grad_vectorized([weight], change)
        after = torch.equal(written[-1], mean) and torch.equal(safe_get_full_grad(weight), mean)
        assert own[0] is not None
        grew = not torch.allclose(own[0], own[1])
        same = torch.allclose(own[1], expected, atol=1e-6), torch.allclose(mean, sums / 2, atol=1e-6)
        found.append((grew, *same, inside, after))
        engine.step()
        assert safe_get_full_grad(weight) is None
    return found


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_inside_no_sync_a_rank_reads_what_it_has_added_up_itself(op: str) -> None:
    for found in run_ranks(read_own_gradients, 2, op):
        assert found == [(True,) * 5] * 4
