"""OneBitAdam, OneBitLamb and ZeroOneAdam on real ranks: before and after the freeze, on the wire, and resumed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, make_tokens, train_engine, whole_state
from net import Net
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsjob.contract.spec import Method
from dsjob.planning.communication import predict_checkpoint
from dsjob.planning.memory import predict_memory
from dsjob.planning.model import Layout
from dsjob.ranks.mesh import World
from dsjob.training.probe import probe_optimizer, size_model

COMMON: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
EARLY: list[dict[str, Any]] = [  # all of them compress from step 3 on
    {"type": "OneBitAdam", "params": {**COMMON, "freeze_step": 2}},
    {"type": "OneBitLamb", "params": {**COMMON, "freeze_step": 2}},
    {"type": "ZeroOneAdam", "params": {**COMMON, "var_update_scaler": 2}},
    {
        "type": "ZeroOneAdam",
        "params": {**COMMON, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    },
]


def cross(others: list[Any], names: list[str]) -> Any:
    """Each optimizer of EARLY with one of `others` in turn; with all of them in `-m full`."""
    return [
        pytest.param(
            optimizer,
            other,
            marks=[] if number % len(others) == place else [pytest.mark.full],
            id=f"{name_optimizer(optimizer)}-{names[place]}",
        )
        for number, optimizer in enumerate(EARLY)
        for place, other in enumerate(others)
    ]


def name_optimizer(optimizer: dict[str, Any]) -> str:
    return "-".join([optimizer["type"], *(key for key in optimizer["params"] if "var" in key)])


def late(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The same, never compressing."""
    keys = {"OneBitAdam": "freeze_step", "OneBitLamb": "freeze_step", "ZeroOneAdam": "var_update_scaler"}
    return {"type": optimizer["type"], "params": {**COMMON, keys[optimizer["type"]]: 1000}}


def train_both(world: World, ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Tensor]]:
    found = []
    for optimizer in (ours, theirs):
        engine = make_engine(0, optimizer=optimizer, gradient_clipping=0.5)
        train_engine(engine, 0, 4)
        found.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", EARLY[:3], ids=name_optimizer)
def test_before_the_freeze_steps_are_exactly_those_of_the_optimizer_without_compression(
    optimizer: dict[str, Any],
) -> None:
    plain = {"type": "Lamb", "params": COMMON}
    if optimizer["type"] != "OneBitLamb":
        plain = {"type": "AdamW", "params": {**COMMON, "fused": False}}
    for ours, theirs in run_ranks(train_both, 2, late(optimizer), plain):
        for name, weight in ours.items():
            assert torch.equal(weight, theirs[name]), name


class Wire(TorchDispatchMode):
    """Counts what a rank hands to collectives, in bytes, and what algorithms of rings send of it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.given, self.sent = ranks, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            tensors = {t.data_ptr(): t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)}
            others = self.ranks - 1
            if "allreduce" in name:
                given, copies = sum(tensors.values()), 2 * others / self.ranks
            elif "alltoall" in name:
                given, copies = max(tensors.values()), others / self.ranks
            elif "allgather" in name:
                given, copies = min(tensors.values()), others
            elif "broadcast" in name:  # of buffers, which every optimizer has
                given, copies = 0, 0
            else:
                raise AssertionError(f"another collective: {name}")
            self.given += given
            self.sent += given * copies
        return func(*args, **(kwargs or {}))


def measure(world: World, optimizer: dict[str, Any], steps: int) -> list[tuple[int, float]]:
    engine = make_engine(0, net=Net(211, 64, 3), optimizer=optimizer, gradient_clipping=1.0)
    seen = []
    for step in range(steps):
        with Wire(world.data_size) as wire:
            train_engine(engine, step, 1)
        seen.append((wire.given, wire.sent))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "ranks"), cross([2, 4], ["2", "4"]))
@pytest.mark.full("OneBitLamb-4", "ZeroOneAdam-var_update_scaler-2", "ZeroOneAdam-var_freeze_step-4")
def test_after_the_freeze_a_sixteenth_of_an_all_reduce_goes_over_the_wire(
    ranks: int, optimizer: dict[str, Any]
) -> None:
    whole = 4 * sum(p.numel() for p in Net(211, 64, 3).parameters())
    for seen in run_ranks(measure, ranks, optimizer, 8):
        assert seen[0][0] == pytest.approx(whole, rel=0.01)
        compressed = [pair for pair in seen if pair[0] < seen[0][0] / 2]
        assert len(compressed) == (3 if "var_update_scaler" in optimizer["params"] else 6)
        for given, sent in compressed:
            assert given <= seen[0][0] / 16
            assert sent <= seen[0][1] / 16


def train_apart(world: World, optimizer: dict[str, Any], config: dict[str, Any], steps: int) -> dict[str, Any]:
    engine = make_engine(0, optimizer=optimizer, **config)
    losses = train_engine(engine, 0, steps)
    weights = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    return {"weights": weights, "norm": engine.get_global_grad_norm(), "losses": losses}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "config"),
    cross(
        [{"accumulation": 3, "gradient_clipping": 0.5}, {"bf16": True}, {"fp16": {"enabled": True}}],
        ["fp32", "bf16", "fp16"],
    ),
)
@pytest.mark.full("ZeroOneAdam-var_update_scaler-fp16")
def test_after_the_freeze_ranks_have_the_same_weights(optimizer: dict[str, Any], config: dict[str, Any]) -> None:
    steps = 8  # ZeroOneAdam's ranks have just met
    first, *others = run_ranks(train_apart, 2, optimizer, config, steps)
    assert all(torch.isfinite(weight).all() for weight in first["weights"].values())
    assert max(first["losses"]) < 5.0  # the tokens are random: there is log(53) to be had at best
    for other in others:
        assert other["norm"] == first["norm"] > 0
        assert other["losses"] != first["losses"]  # the ranks have other samples
        for name, weight in first["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name


def overflow_on_one_rank(world: World) -> tuple[bool, bool, float]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = make_engine(0, optimizer=EARLY[0], fp16=fp16)
    train_engine(engine, 0, 3)
    engine.optimizer.zero_grad()
    before = [p.detach().clone() for p in engine.module.parameters()]
    x, y = make_tokens(9, 2)
    engine.backward(engine(x, y) * (float("inf") if world.data_rank == 1 else 1.0))
    engine.step()
    same = all(torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))
    return engine.was_step_applied(), same, engine.loss_scale()


@pytest.mark.slow
def test_an_overflow_on_one_rank_is_skipped_by_all_while_gradients_are_their_own() -> None:
    assert run_ranks(overflow_on_one_rank, 2) == [(False, True, 8.0)] * 2


def clip_own(world: World) -> tuple[float, float, float]:
    """This rank's own norm, what is left of it after clipping, and the norm that the engine tells."""
    engine = make_engine(0, optimizer=EARLY[0], gradient_clipping=0.01)
    train_engine(engine, 0, 2)
    x, y = make_tokens(50 + world.data_rank, 2)
    loss = engine(x, y)
    own = torch.autograd.grad(loss, list(engine.module.parameters()), retain_graph=True)
    engine.backward(loss)
    engine.strategy.finish_gradients()
    told = engine.strategy.clip(0.01)
    left = torch.cat([p.grad.reshape(-1) for p in engine.module.parameters() if p.grad is not None]).norm()
    return float(torch.cat([g.reshape(-1) for g in own]).norm()), float(left), float(told)


@pytest.mark.slow
def test_while_gradients_are_their_own_each_rank_clips_them_by_their_own_norm() -> None:
    found = run_ranks(clip_own, 2)
    told = (sum(own**2 for own, _, _ in found) / 2) ** 0.5
    assert found[0][0] != found[1][0]
    for _, left, norm in found:
        assert left == pytest.approx(0.01, rel=1e-3)
        assert norm == pytest.approx(told, rel=1e-5)


def train_and_resume(world: World, folder: str, optimizer: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What differs between a run of 9 steps, saved on its way, and one that goes on after 5."""
    engine = make_engine(0, optimizer=optimizer, **config)
    train_engine(engine, 0, 5)
    engine.save_checkpoint(folder)
    losses = train_engine(engine, 5, 4)
    again = make_engine(0, optimizer=optimizer, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again.load_checkpoint(folder)
    resumed = train_engine(again, 5, 4)
    ours, theirs = whole_state(engine), whole_state(again)
    differing = [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])]
    return differing + ([] if losses == resumed else [f"losses {losses} {resumed}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "config"), cross([{"fp16": {"enabled": True}}, {"gradient_clipping": 0.5}], ["fp16", "fp32"])
)
@pytest.mark.full("OneBitLamb-fp32", "ZeroOneAdam-var_update_scaler-fp16", "OneBitAdam-fp16")
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: dict[str, Any], config: dict[str, Any]) -> None:
    assert run_ranks(train_and_resume, 2, str(tmp_path), optimizer, config) == [[], []]


def measure_state(world: World, optimizer: dict[str, Any], folder: str) -> tuple[int, int, int]:
    """Bytes of state on this rank, and as planned; of the checkpoint as planned."""
    net = Net(1031, 67, 3)
    model, state = size_model(net), probe_optimizer(Method(optimizer["type"], optimizer["params"], None))
    engine = make_engine(0, net=net, optimizer=optimizer)
    train_engine(engine, 0, 5)
    engine.save_checkpoint(folder)
    held = sum(t.nbytes for entry in engine.optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
    layout = Layout(0, world.data_size)
    planned = next(i.bytes for i in predict_memory(model, layout, state).items if i.name == "optimizer state")
    return held, planned, predict_checkpoint(model, layout, state).whole


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [EARLY[0], EARLY[1], EARLY[3]], ids=name_optimizer)
@pytest.mark.full("OneBitLamb")
def test_state_and_checkpoints_are_as_large_as_planned(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    for held, planned, saved in run_ranks(measure_state, 2, optimizer, str(tmp_path)):
        assert held == pytest.approx(planned, rel=0.02)
        files = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
        assert saved == pytest.approx(files, rel=0.02)


def save_some(world: World, folder: str, optimizer: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(0, optimizer=optimizer)
    train_engine(engine, 0, 5)
    engine.save_checkpoint(folder)
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def load_elsewhere(world: World, folder: str, optimizer: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(0, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder)
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    losses = train_engine(engine, 5, 7)
    after = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    notes = [str(note.message) for note in told if "were reset" in str(note.message)]
    return {"weights": weights, "losses": losses, "after": after, "notes": notes}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "ranks"), cross([3, 1], ["3", "1"]))
@pytest.mark.full("OneBitLamb-1", "ZeroOneAdam-var_update_scaler-3", "OneBitAdam-3")
def test_on_another_number_of_ranks_the_errors_begin_anew_and_that_is_told(
    tmp_path: Path, optimizer: dict[str, Any], ranks: int
) -> None:
    saved = run_ranks(save_some, 2, str(tmp_path), optimizer)[0]
    loaded = run_ranks(load_elsewhere, ranks, str(tmp_path), optimizer)
    for own in loaded:
        assert len(own["notes"]) == 1
        assert "server_error, worker_error were reset" in own["notes"][0]
        assert all(torch.equal(weight, saved[name]) for name, weight in own["weights"].items())
        assert all(torch.equal(weight, loaded[0]["after"][name]) for name, weight in own["after"].items())
        assert max(own["losses"]) < 5.0


class Branches(nn.Module):
    """After three passes each rank uses a branch of its own; a buffer adds up what the rank has seen."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.passes, self.found = rank, 0, []
        self.branches = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(float(self.seen))
        self.seen += x.sum().detach()
        self.passes += 1
        used = list(self.branches) if self.passes <= 3 else [self.branches[self.rank]]
        return sum((branch(x).square().mean() for branch in used), torch.zeros(()))


def use_branches(world: World, optimizer: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    torch.manual_seed(0)
    net = Branches(world.data_rank)
    engine = make_engine(0, net=net, optimizer=optimizer)
    generator = torch.Generator().manual_seed(world.data_rank)
    for _ in range(12):  # ZeroOneAdam's ranks meet at the last
        engine.backward(engine(torch.randn(2, 4, generator=generator)))
        engine.step()
    return net.found, [p.detach().flatten().tolist() for p in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [EARLY[0], EARLY[1], EARLY[3]], ids=name_optimizer)
@pytest.mark.full("OneBitLamb")
def test_ranks_may_use_other_parameters_and_begin_each_step_with_the_same_buffers(optimizer: dict[str, Any]) -> None:
    (first, weights), (second, others) = run_ranks(use_branches, 2, optimizer)
    assert first == second
    assert len(set(first)) == 12
    assert weights == others
