"""Parameters that a program freezes in mid-run and trains again later, beside plain PyTorch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from engines import ADAMW, build_net, make_engine, make_tokens, whole_state
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.parallel.zero import GatheredParameters
from dsjob.ranks.mesh import World

STEPS, ROWS, ACCUMULATION = 5, 8, 2
FROZEN = ("emb.", "blocks.0.", "blocks.1.ln.weight")  # of a unit of its own all or some, and of what is outside
# Name, the micro step of a step before which it happens, the step from which on they are frozen, and trained again.
CASES = [
    ("between steps", 0, 2, 4),
    ("before the first step", 0, 0, 3),
    ("after an evaluation", 0, 2, 4),
    ("between micro steps", 1, 2, 4),
    ("while gathered", 0, 2, 4),
]


def choose(net: nn.Module) -> Iterator[nn.Parameter]:
    return (p for name, p in net.named_parameters() if name.startswith(FROZEN))


def set_trained(net: nn.Module, trained: bool) -> None:
    for parameter in choose(net):
        parameter.requires_grad_(trained)


def act(case: str, engine: Engine, trained: bool) -> None:
    if case == "after an evaluation":
        engine.eval()
        with torch.no_grad():
            engine(*make_tokens(0, 2))
        engine.train()
    with GatheredParameters(choose(engine.module), enabled=case == "while gathered"):
        set_trained(engine.module, trained)


def train(case: str, pass_over: Callable[[Tensor, Tensor], None], change: Callable[[bool], None]) -> None:
    """Passes over all micro batches, and freezes and trains where the case says so."""
    _, micro, freeze, thaw = next(found for found in CASES if found[0] == case)
    for step in range(STEPS):
        x, y = make_tokens(step, ROWS)
        for number, (rows, targets) in enumerate(zip(x.chunk(ACCUMULATION), y.chunk(ACCUMULATION), strict=True)):
            if number == micro and step in (freeze, thaw):
                change(step == thaw)
            pass_over(rows, targets)


def train_by_hand(case: str) -> dict[str, Tensor]:
    """The weights after all steps of torch.optim.AdamW, which leaves alone what has no gradient."""
    net, passes = build_net(), []
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW["params"])

    def pass_over(x: Tensor, y: Tensor) -> None:
        (net(x, y) / ACCUMULATION).backward()
        passes.append(x)
        if len(passes) % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    train(case, pass_over, lambda trained: set_trained(net, trained))
    return {name: p.detach() for name, p in net.named_parameters()}


def train_engine(world: World, case: str, stage: int, bf16: bool) -> list[dict[str, Tensor]]:
    """The masters after each optimizer step."""
    engine = make_engine(stage, accumulation=ACCUMULATION, bf16=bf16)
    found: list[dict[str, Tensor]] = []

    def pass_over(x: Tensor, y: Tensor) -> None:
        rows, targets = (tokens.chunk(world.data_size)[world.data_rank] for tokens in (x, y))
        engine.backward(engine(rows, targets))
        engine.step()
        if engine.rhythm.micro_steps % ACCUMULATION == 0:
            found.append({n.removeprefix("model."): t.clone() for n, t in whole_state(engine).items()})

    train(case, pass_over, lambda trained: act(case, engine, trained))
    engine.destroy()
    return found


def train_all(world: World, every: int) -> dict[tuple[str, int, bool], list[dict[str, Tensor]]]:
    """Every n-th cell; the next case begins with another stage."""
    stages = range(4) if world.data_size > 1 else (0,)  # on one rank all stages are one
    fp32 = itertools.product((case for case, *_ in CASES), stages, (False,))
    bf16 = itertools.product(("before the first step", "after an evaluation"), stages, (True,))
    cells = [cell for number, cell in enumerate((*fp32, *bf16)) if (number + number // len(stages)) % every == 0]
    return {cell: train_engine(world, *cell) for cell in cells}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "every"), [(2, 5), *(pytest.param(ranks, 1, marks=pytest.mark.full) for ranks in (1, 2))]
)
def test_freezing_and_training_again_is_that_of_plain_pytorch(ranks: int, every: int) -> None:
    expected = {case: train_by_hand(case) for case, *_ in CASES}
    first, *others = run_ranks(train_all, ranks, every)
    for (case, stage, bf16), course in first.items():
        at = f"{case}, stage {stage}, {bf16=}"
        assert all(torch.equal(other[case, stage, bf16][-1][n], course[-1][n]) for other in others for n in course[-1])
        _, micro, freeze, thaw = next(found for found in CASES if found[0] == case)
        # What has had a gradient in an earlier micro step takes that step.
        frozen = range(freeze + (micro > 0), thaw)
        for name, weight in expected[case].items():
            moves = [not torch.equal(before[name], after[name]) for before, after in itertools.pairwise(course)]
            assert moves == [not (name.startswith(FROZEN) and k in frozen) for k in range(1, STEPS)], f"{at}: {name}"
            if not bf16:
                # A fused AdamW rounds differently, and divides gradients near zero by their own size: 1/500 of lr.
                torch.testing.assert_close(course[-1][name], weight, rtol=0, atol=2e-5, msg=f"{at}: {name}")


def train_beside_a_reference(world: World, stage: int) -> dict[str, Tensor]:
    """As DPO with adapters: in training and evaluation, they are frozen for a pass of the reference after their own."""
    engine = make_engine(stage)
    for step in range(STEPS):
        rows, targets = (tokens.chunk(world.data_size)[world.data_rank] for tokens in make_tokens(step, ROWS))
        for training in (True, False):
            with torch.set_grad_enabled(training):
                loss = engine(rows, targets)
            set_trained(engine.module, False)
            with torch.no_grad():
                (engine if step % 2 else engine.module)(rows, targets)
            set_trained(engine.module, True)
            if training:
                engine.backward(loss)
                engine.step()
    return {name.removeprefix("model."): tensor.clone() for name, tensor in whole_state(engine).items()}


@pytest.mark.parametrize("stage", range(4))
def test_parameters_frozen_for_passes_without_gradients_are_trained(stage: int) -> None:
    net = build_net()
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW["params"])
    for step in range(STEPS):
        optimizer.zero_grad()
        net(*make_tokens(step, ROWS)).backward()
        optimizer.step()
    for state in run_ranks(train_beside_a_reference, 2, stage):
        for name, weight in net.named_parameters():
            torch.testing.assert_close(state[name], weight.detach(), rtol=0, atol=2e-5, msg=name)


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
THAWED = [(0, {}), (0, {"bf16": True}), (1, {}), (2, {"bf16": True}), (3, {}), (2, {"zero_optimization": OFFLOADED})]


def thaw_after_building(world: World) -> list[str]:
    """What the step says that follows on each thaw, by row of THAWED; the steps before it are taken."""
    told = []
    for stage, config in THAWED:
        net = build_net()
        set_trained(net, False)
        engine = make_engine(stage, net=net, accumulation=ACCUMULATION, **config)

        def take_step(engine: Engine = engine) -> None:
            for rows in make_tokens(0, ROWS)[0].chunk(ACCUMULATION):
                engine.backward(engine(rows, rows))
                engine.step()

        take_step()
        set_trained(engine.module, True)
        with torch.no_grad():
            engine(*make_tokens(0, 2))  # adapters of a reference are thawed for such passes
        set_trained(engine.module, False)
        take_step()
        set_trained(engine.module, True)
        with pytest.raises(UsageError) as error:
            take_step()
        told.append(error.value.message)
        engine.destroy()
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_frozen_when_the_engine_was_built_is_not_left_alone_in_silence(ranks: int) -> None:
    for told in run_ranks(thaw_after_building, ranks):
        for message in told:
            assert re.search(r"blocks\.0\.\S+ and \d+ more; they were frozen when the engine was built", message)
