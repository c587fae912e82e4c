"""Blocks that are computed again, on real ranks at every stage: the same numbers and names as without, less memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Ledger
from engines import build_net, make_engine, train_engine, whole_state
from net import Net
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.ranks.mesh import World

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "every second": {"mode": "full", "interval": 2},
    "selective": {"mode": "selective"},
    "offloaded": {"mode": "full", "cpu_checkpointing": True},
}


class DropBlock(nn.Module):
    """The fixtures' block with dropout around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.drop(self.inner(self.drop(x)))
        return kept


def make_net(kind: str) -> Net:
    net = build_net()
    if kind == "dropout":
        net.blocks = nn.ModuleList(DropBlock(block) for block in net.blocks)
    if kind == "tied and frozen":
        net.head.weight = net.emb.weight
        net.emb.requires_grad_(False)  # so that the input of the first block needs no gradient
        net.blocks[1].requires_grad_(False)
    return net


def train(kind: str, stage: int, config: dict[str, Any], accumulation: int = 1) -> dict[str, Any]:
    torch.manual_seed(7)
    engine = make_engine(stage, net=make_net(kind), accumulation=accumulation, **config)
    losses = train_engine(engine, 0, STEPS)
    return {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "state": whole_state(engine),
        "random": torch.get_rng_state(),
    }


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def compare_ways(
    world: World, kind: str, accumulation: int, precisions: tuple[str, ...], every: int
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Of each stage, precision and way: what a run with it gives, and what one without. Or of each n-th way, others at
    each stage and precision."""
    rows = []
    for first, (stage, precision) in enumerate(itertools.product(range(4), precisions)):
        plain = train(kind, stage, PRECISIONS[precision], accumulation)
        offset = sum(divmod(first, len(precisions))) + 1  # of the ways that are left out, by stage and precision
        for number, (name, section) in enumerate(WAYS.items(), offset):
            if number % every:
                continue
            if name == "selective" and precision == "autocast" and stage:
                continue  # a rule refuses it
            config = {**PRECISIONS[precision], "activation_checkpointing": section}
            rows.append((f"stage {stage}, {precision}, {name}", train(kind, stage, config, accumulation), plain))
    return rows


def check_equal(rows: list[Any]) -> None:
    for name, found, plain in rows:
        assert found["losses"] == plain["losses"], name
        assert found["norm"] == plain["norm"], name
        assert torch.equal(found["random"], plain["random"]), name
        assert found["state"].keys() == plain["state"].keys(), name
        for key, tensor in plain["state"].items():
            torch.testing.assert_close(found["state"][key], tensor, rtol=0, atol=0, msg=f"{name}: {key}")


RUNS = [(1, 3, ("fp32", "bf16")), (2, 1, ("fp32", "bf16")), (2, 3, ("fp16", "autocast"))]
CUT = [(1, 3, ("bf16",)), (2, 1, ("fp32",)), (2, 2, ("fp16", "autocast"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size", "accumulation", "precisions", "every"),
    [
        *(("dropout", *run, 2) for run in CUT),
        ("tied and frozen", *CUT[0], 2),
        *(
            pytest.param(kind, *run, 1, marks=pytest.mark.full)
            for kind, run in itertools.product(("dropout", "tied and frozen"), RUNS)
        ),
    ],
)
@pytest.mark.full("dropout-2-2-precisions2-2", "dropout-2-1-precisions1-2")
def test_every_stage_gives_bit_for_bit_what_it_gives_without(
    kind: str, world_size: int, accumulation: int, precisions: tuple[str, ...], every: int
) -> None:
    for rows in run_ranks(compare_ways, world_size, kind, accumulation, precisions, every):
        refused = ("autocast" in precisions) * (3 if every == 1 else 1)
        assert len(rows) == 4 * len(precisions) * len(WAYS) // every - refused
        assert {name.rpartition(", ")[2] for name, _, _ in rows} == set(WAYS)
        check_equal(rows)


WIDTH, BLOCKS, TOKENS = 64, 8, 3000  # so many tokens that buffers of collectives do not count


def keep(world: World, stages: tuple[int, ...]) -> dict[tuple[int, str], tuple[int, int]]:
    """For each stage and way: bytes that a forward pass leaves, and the most that a step adds."""
    found = {}
    for stage, name in itertools.product(stages, ("none", "full", "every second")):
        section = WAYS.get(name, {"mode": name})
        engine = make_engine(stage, net=Net(53, WIDTH, BLOCKS), activation_checkpointing=section)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        for _ in range(2):  # the first step makes optimizer state and buffers
            with Ledger() as ledger:
                ledger.mark("before")
                loss = engine(tokens, tokens)
                ledger.mark("after")
                engine.backward(loss)
                del loss
                engine.step()
        found[stage, name] = ledger.live("after") - ledger.live("before"), ledger.peak
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "stages"),
    [(1, (0,)), (2, (3,)), *(pytest.param(n, (0, 1, 2, 3), marks=pytest.mark.full) for n in (1, 2))],
)
@pytest.mark.full("2-stages1")
def test_memory_falls_by_what_the_blocks_would_keep(world_size: int, stages: tuple[int, ...]) -> None:
    """Beside its input, a block keeps what comes out of its norm, and the hidden layer after relu."""
    spared = BLOCKS * TOKENS * 4 * (WIDTH + 3 * WIDTH + 1)
    for found in run_ranks(keep, world_size, stages):
        for stage in stages:
            (kept, peak), (kept_full, peak_full), (kept_half, _) = (
                found[stage, name] for name in ("none", "full", "every second")
            )
            assert kept - kept_full == pytest.approx(spared, rel=0.05)
            assert kept - kept_half == pytest.approx(spared / 2, rel=0.05)
            # One block at a time is whole again; what stage 3 gathers is beside it.
            assert peak - peak_full == pytest.approx(spared * (BLOCKS - 1) / BLOCKS, rel=0.06)


def resume(world: World, folder: str, ways: int) -> list[tuple[list[float], list[float], set[str], set[str]]]:
    """For each stage: losses of a run, and of one that goes on with recomputation switched over; names of tensors.

    `ways`: 2 for on and off, 1 for one of them, in the next stage the other one.
    """
    found = []
    for stage, number in itertools.product(range(4), range(ways)):
        first, then = [{"mode": "full"}, {}][:: (-1) ** (stage + number)]
        torch.manual_seed(7)
        engine = make_engine(stage, net=make_net("plain"), activation_checkpointing=first)
        losses = train_engine(engine, 0, 2)
        url = f"{folder}/{stage}-{len(first)}"
        engine.save_checkpoint(url)
        losses += train_engine(engine, 2, 2)

        other = make_engine(stage, net=make_net("plain"), activation_checkpointing=then)
        other.load_checkpoint(url)
        names = set(other.module.state_dict()) | {name.removeprefix("model.") for name in other.state().model_tensors()}
        found.append((losses[2:], train_engine(other, 2, 2), names, set(build_net().state_dict())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.full
def test_a_run_goes_on_with_it_switched_over_and_names_are_the_models_own(ways: int, tmp_path: Path) -> None:
    for found in run_ranks(resume, 2, str(tmp_path), ways):
        assert len(found) == 4 * ways
        for losses, again, names, own in found:
            assert again == losses
            assert names == own


def compile_blocks(
    world: World, precisions: tuple[str, ...], stages: tuple[int, ...]
) -> list[tuple[str, list[float], list[float], int]]:
    """Of each stage, precision and way: losses compiled and not, and how many graphs were compiled."""
    rows = []
    for stage, precision in itertools.product(stages, precisions):
        expected = train("plain", stage, PRECISIONS[precision])["losses"]
        for mode in ("none", "full", *(("selective",) if precision != "autocast" or stage == 0 else ())):
            sections = {
                "compile": {"enabled": True, "backend": "aot_eager"},
                "activation_checkpointing": {"mode": mode},
            }
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            losses = train("plain", stage, {**PRECISIONS[precision], **sections})["losses"]
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            rows.append((f"stage {stage}, {precision}, {mode}", losses, expected, graphs))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "precisions"),
    [
        (1, ("bf16",)),
        pytest.param(2, ("fp32",), marks=pytest.mark.full),
        *(pytest.param(n, ("fp32", "bf16", "autocast"), marks=pytest.mark.full) for n in (1, 2)),
    ],
)
def test_compiled_blocks_follow_the_others_at_every_stage(world_size: int, precisions: tuple[str, ...]) -> None:
    """And are compiled once for all, but where autocast gathers modules inside of them."""
    stages = (0, 3) if precisions == ("bf16",) else (0, 1, 2, 3)
    for rows in run_ranks(compile_blocks, world_size, precisions, stages):
        for name, losses, expected, graphs in rows:
            assert graphs == 1 or "autocast" in name, name
            assert losses == pytest.approx(expected, rel=1e-6 if "fp32" in name else 4e-3), name
