"""A checkpoint of any world size and stage loads into any other, exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ADAMW, make_engine, make_tokens, train_engine, whole_state
from net import Net
from ranks import run_ranks
from test_stages import TiedNet

from dsjob.checkpoint.live import shards
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.ranks.mesh import World

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}
STATE = {"epoch": 1, "note": "hello", "pair": (1, 2)}


def save(
    world: World, folder: str, stage: int, bf16: bool, optimizer: dict[str, Any] = ADAMW
) -> tuple[dict[str, Any], list[float]]:
    engine = make_engine(stage, net=TiedNet(), bf16=bf16, scheduler=SCHEDULE, optimizer=optimizer)
    train_engine(engine, 0, 3)
    engine.save_checkpoint(folder, client_state=STATE)
    state = whole_state(engine)
    return state, train_engine(engine, 3, 2)


def load(
    world: World, folder: str, stage: int, bf16: bool, optimizer: dict[str, Any] = ADAMW
) -> tuple[dict[str, Any], list[float], Any]:
    engine = make_engine(stage, net=TiedNet(), bf16=bf16, scheduler=SCHEDULE, optimizer=optimizer)
    url, client_state = engine.load_checkpoint(folder)
    assert url is not None
    assert engine.global_steps == 3
    state = whole_state(engine)
    return state, train_engine(engine, 3, 2), client_state


PAIRS = [((2, 3), (1, 0)), ((1, 0), (2, 3)), ((2, 1), (3, 2)), ((4, 3), (2, 0)), ((2, 0), (4, 1)), ((2, 3), (2, 3))]
SHRUNK, SHARDED = ((2, 3), (1, 0)), ((2, 0), (2, 1))
HEADS = {"heads": {"match": "*bias", "lr": 0.002}}
LEFT_OUT = [(PAIRS[0], True), (PAIRS[1], False), (PAIRS[2], True), (PAIRS[4], False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "bf16"),
    [
        *((*pair, number == 1) for number, pair in enumerate(PAIRS[:4])),
        *((*pair, False) for pair in PAIRS[5:]),
        *(pytest.param(*pair, bf16, marks=pytest.mark.full) for pair, bf16 in LEFT_OUT),
    ],
)
@pytest.mark.full("saved1-loaded1-True", "saved3-loaded3-False", "saved4-loaded4-False", "saved2-loaded2-False")
def test_state_is_equal_to_the_bit_and_training_goes_on(
    saved: tuple[int, int], loaded: tuple[int, int], bf16: bool, tmp_path: Path
) -> None:
    before = run_ranks(save, saved[0], str(tmp_path), saved[1], bf16)
    after = run_ranks(load, loaded[0], str(tmp_path), loaded[1], bf16)
    expected = before[0][0]
    for state, _, client_state in after:
        assert client_state == STATE
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            if bf16 and "blocks.0" in name:  # frozen weights: the compute copy is what is kept at stage 0
                assert torch.equal(state[name].bfloat16(), tensor.bfloat16()), name
            else:
                assert torch.equal(state[name], tensor), name
    mean = lambda losses: torch.tensor(losses).mean(0)  # noqa: E731
    tolerance = 2e-2 if bf16 else 1e-5
    torch.testing.assert_close(mean([r[1] for r in after]), mean([r[1] for r in before]), rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rules", "pair"),
    [
        ("Lamb", {}, SHRUNK),
        ("Lion", {}, SHARDED),
        ("Muon", {}, SHARDED),
        ("Muon", HEADS, SHRUNK),
        pytest.param("Lamb", {}, SHARDED, marks=pytest.mark.full),
        pytest.param("Lion", {}, SHRUNK, marks=pytest.mark.full),
        pytest.param("Muon", {}, SHRUNK, marks=pytest.mark.full),
        pytest.param("Muon", HEADS, SHARDED, marks=pytest.mark.full),
    ],
)
@pytest.mark.full("Muon-rules3-pair3", "Lion-rules1-pair1", "Muon-rules2-pair2")
def test_the_state_of_every_optimizer_is_equal_to_the_bit(
    kind: str, rules: dict[str, Any], pair: tuple[tuple[int, int], tuple[int, int]], tmp_path: Path
) -> None:
    (ranks, stage), (ranks_then, stage_then) = pair
    optimizer = {"type": kind, "params": {"lr": 0.001}, "param_groups": rules}
    before = run_ranks(save, ranks, str(tmp_path), stage, False, optimizer)
    expected = before[0][0]
    assert any(name.startswith("optimizer.") for name in expected)
    after = run_ranks(load, ranks_then, str(tmp_path), stage_then, False, optimizer)
    for state, _, _ in after:
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
    found, wanted = (torch.tensor([result[1] for result in results]).mean(0) for results in (after, before))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def load_after_evaluation(world: World, folder: str) -> list[tuple[float, float]]:
    """For stages the losses, after loading, of an engine that has evaluated before and of one that has not."""
    x, y = make_tokens(7, 4)
    found = []
    for stage in (0, 1, 3):
        saved = make_engine(stage)
        train_engine(saved, 0, 2)
        saved.save_checkpoint(f"{folder}/{stage}")
        used, fresh = make_engine(stage), make_engine(stage)
        with torch.no_grad():
            used(x, y)
        losses = []
        for engine in (used, fresh):
            engine.load_checkpoint(f"{folder}/{stage}")
            with torch.no_grad():
                losses.append(engine(x, y).item())
        found.append((losses[0], losses[1]))
    return found


@pytest.mark.slow
def test_an_engine_that_has_evaluated_sees_what_it_loads(tmp_path: Path) -> None:
    for found in run_ranks(load_after_evaluation, 2, str(tmp_path)):
        for used, fresh in found:
            assert used == pytest.approx(fresh, abs=1e-6)


def load_over_a_trained_engine(world: World, folder: str) -> list[tuple[bool, bool, bool]]:
    """By stage: whether state and losses are those that were saved, and whether they lie where they lay before."""
    found = []
    for stage in (0, 3):
        state, losses = save(world, f"{folder}/{stage}", stage, False)
        engine = make_engine(stage, net=TiedNet(), scheduler=SCHEDULE)
        train_engine(engine, 7, 2)
        before = {name: value.data_ptr() for name, value in list_moments(engine).items()}
        engine.load_checkpoint(f"{folder}/{stage}")
        loaded = whole_state(engine)
        same = all(torch.equal(value, loaded[name]) for name, value in state.items() if isinstance(value, torch.Tensor))
        stayed = before == {name: value.data_ptr() for name, value in list_moments(engine).items()}
        found.append((same, stayed, train_engine(engine, 3, 2) == losses))
    return found


def list_moments(engine: Any) -> dict[str, torch.Tensor]:
    tensors = engine.state().optimizer_tensors()
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}


@pytest.mark.slow
def test_a_trained_engine_loads_into_the_memory_that_it_has(tmp_path: Path) -> None:
    assert run_ranks(load_over_a_trained_engine, 2, str(tmp_path)) == [[(True, True, True)] * 2] * 2


def save_what_changes(world: World, folder: str) -> tuple[int, list[bool]]:
    """How often saves of one checkpointer were planned, and whether each loads as it was."""
    planned, original = [], shards._plan_anew

    def plan(*given: Any) -> Any:
        planned.append(1)
        return original(*given)

    shards._plan_anew = plan
    checkpointer, states, same = Checkpointer(folder, world=world), [], []
    small, large = make_engine(3, net=Net(53, 16, 2)), make_engine(3, net=Net(53, 24, 2))
    for number, engine in enumerate([small, small, small, large, large, small]):
        train_engine(engine, 0, 1 if number else 0)  # the first save has no moments
        checkpointer.save(engine, tag=f"save{number}")
        states.append(whole_state(engine))
    for number, engine in enumerate([small, small, small, large, large, small]):
        checkpointer.load(engine, tag=f"save{number}", optimizer=bool(number))
        state = {n: t for n, t in whole_state(engine).items() if number or n.startswith("model.")}
        same.append(all(torch.equal(state[n], t) for n, t in states[number].items()))
    return len(planned), same


@pytest.mark.slow
@pytest.mark.full
def test_a_save_is_planned_anew_where_tensors_have_changed(tmp_path: Path) -> None:
    for planned, same in run_ranks(save_what_changes, 2, str(tmp_path)):
        assert same == [True] * 6
        assert planned == 4
