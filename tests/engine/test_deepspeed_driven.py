"""`engine: deepspeed`: the installed DeepSpeed behind the loop's face, beside dsjob's own engine."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ADAMW, build_net, make_tokens, train_engine, whole_state
from job_documents import make_job as make_document
from job_documents import resolve
from jobs import dsjob, make_job, read_metrics
from machine import lacks_fp16
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.contract.models import SOLE
from dsjob.document.resolve import complete_job
from dsjob.engine.choice import build_job_engine
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust

INSTALLED = importlib.util.find_spec("deepspeed") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="DeepSpeed is not installed: pip install '.[deepspeed]'"),
]
ROWS = 12
ON = {"enabled": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
GROUPS = {"no_decay": {"match": ["*bias"], "weight_decay": 0.0}}
FIXED = {"enabled": True, "loss_scale": 256}
# Name, stage, accumulation, sections; how far losses and norms may be from dsjob's own, relatively.
CASES: list[tuple[str, int, int, dict[str, Any], float]] = [
    *((f"stage {stage}", stage, 1, {}, 1e-6) for stage in range(4)),
    *((f"stage {stage}, accumulated", stage, 3, {}, 1e-6) for stage in (0, 2, 3)),
    ("stage 0, bf16", 0, 1, {"bf16": ON}, 8e-3),
    *((f"stage {stage}, bf16", stage, 1, {"bf16": ON}, 1e-3) for stage in (1, 3)),
    *((f"stage {stage}, fp16", stage, 1, {"fp16": FIXED}, 2e-4) for stage in (1, 3)),
    ("autocast", 2, 1, {"torch_autocast": {**ON, "dtype": "bfloat16"}}, 1e-6),
    ("offloaded", 2, 1, {"zero_optimization": OFFLOAD}, 1e-6),
    ("checkpointed", 3, 1, {"activation_checkpointing": {"mode": "full"}}, 1e-6),
    ("summed", 1, 1, {"gradient_allreduce_op": "sum"}, 1e-6),
    ("no clipping", 0, 1, {"gradient_clipping": 0}, 1e-6),
    ("groups", 2, 1, {"optimizer": {**ADAMW, "param_groups": GROUPS}}, 1e-6),
    ("another optimizer", 1, 1, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, 1e-6),
    ("schedule", 1, 1, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}, 1e-6),
]
# Only `-m full` compares these.
LONG = {
    "stage 1", "stage 2", "stage 3, bf16", "no clipping", "schedule", "bf16, stage 1", "stage 0, accumulated",
    "stage 2, accumulated", "stage 0, bf16", "checkpointed", "summed", "groups", "another optimizer", "fp32, stage 0",
    "fp32, stage 2", "offloaded", "bf16, stage 0", "bf16 with sums in fp32, stage 1", "stage 1, bf16", "stage 1, fp16",
}  # fmt: skip


def make_engine(
    world: World, engine: str, stage: int, accumulation: int = 1, net: nn.Module | None = None, **sections: Any
) -> Engine:
    micro = ROWS // world.data_size // accumulation
    zero = {"stage": stage, **sections.pop("zero_optimization", {})}
    document = make_document(
        trainer={"micro_batch": micro, "grad_accum": accumulation, "max_steps": 10},
        **{"optimizer": ADAMW, "zero_optimization": zero, "engine": engine, **sections},
    )
    resolved = resolve(document, world_size=world.data_size)
    return build_job_engine(net or build_net(), complete_job(resolved).models[SOLE], world, trust=Trust())


def can_run(name: str) -> bool:
    """Whether DeepSpeed runs a case on this machine: it refuses fp16 on most CPUs."""
    return "fp16" not in name or lacks_fp16() is None


def cell(name: str, *values: Any) -> Any:
    """A case as pytest's parameters, skipped with the reason where this machine cannot run it."""
    marks = [pytest.mark.skipif(not can_run(name), reason=str(lacks_fp16()))]
    return pytest.param(name, *values, marks=[*marks, pytest.mark.full] if name in LONG else marks)


def compare(world: World, long: bool) -> dict[str, Any]:
    found = {}
    for name, stage, accumulation, sections, _ in CASES:
        if not can_run(name) or (name in LONG) != long:
            continue
        sides = {}
        for side in ("dsjob", "deepspeed"):
            engine = make_engine(world, side, stage, accumulation, **sections)
            losses = train_engine(engine, 0, 4, ROWS)
            sides[side] = (losses, engine.get_global_grad_norm(), engine.last_lr, engine.count_parameters())
            engine.destroy()
        found[name] = sides
    return found


def step_at_once(world: World) -> tuple[list[float], list[float]]:
    """Losses of three steps of two micro batches, by `forward`, `backward` and `step`, and by `run_step`."""
    usual = train_engine(make_engine(world, "deepspeed", 1, 2), 0, 3, ROWS)
    engine, found = make_engine(world, "deepspeed", 1, 2), []
    for step in range(3):
        parts = [part.chunk(2 * world.data_size) for part in make_tokens(step, ROWS)]
        mine = [tuple(part[micro * world.data_size + world.data_rank] for part in parts) for micro in range(2)]
        found.append(float(engine.run_step(mine, lambda outputs, _: outputs)))
    assert engine.global_steps == 3
    return usual, found


def resize(world: World) -> tuple[int, int]:
    """DeepSpeed's accumulation steps and dsjob's count of steps, after a change of dsjob's train batch and one pass."""
    engine = make_engine(world, "deepspeed", 1, 2)
    engine.rhythm.set_train_batch(ROWS // 2)
    tokens, targets = (part.chunk(2 * world.data_size)[world.data_rank] for part in make_tokens(0, ROWS))
    engine.backward(engine(tokens, targets))
    engine.step()
    return engine.driven.gradient_accumulation_steps(), engine.global_steps


def run_all(world: World, long: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"compared": compare(world, long), "saved": save_and_load(world, long)}
    stages = range(4) if long else (0, 3)
    found |= {"anew": begin_anew(world, stages), "odd": train_odd(world, stages) if world.data_size > 1 else []}
    return found if long else {**found, "at once": step_at_once(world), "resized": resize(world)}


RANKS = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])


@functools.cache
def run_on(ranks: int, long: bool) -> list[dict[str, Any]]:
    """What all ranks of one world have found: DeepSpeed takes long to import. long: only the cases in LONG."""
    return run_ranks(run_all, ranks, long)


@RANKS
@pytest.mark.parametrize(("name", "tolerance"), [cell(case[0], case[-1]) for case in CASES])
def test_losses_norms_and_rates_are_those_of_dsjobs_engine(ranks: int, name: str, tolerance: float) -> None:
    for rank in run_on(ranks, name in LONG):
        found = rank["compared"][name].values()
        (ours, norm, rates, sizes), (theirs, their_norm, their_rates, their_sizes) = found
        assert theirs == pytest.approx(ours, rel=tolerance)
        assert their_rates == rates
        assert their_sizes == sizes
        if name != "no clipping":
            assert their_norm == pytest.approx(norm, rel=tolerance)
        else:
            assert their_norm == 0.0  # DeepSpeed computes none


class Odd(nn.Module):
    """A frozen layer, one that is never used, a tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.frozen(self.first(x)))).square().mean()


SAVED = [
    ("fp32", 0, {}),
    ("fp32", 2, {}),
    ("fp32", 3, {}),
    ("bf16", 0, {"bf16": ON}),
    ("bf16", 1, {"bf16": ON}),
    ("bf16 with sums in fp32", 1, {"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}),
    ("fp16", 2, {"fp16": {**ON, "initial_scale_power": 8, "loss_scale_window": 2}}),
    ("offloaded", 2, {"zero_optimization": OFFLOAD}),
]


@RANKS
def test_a_whole_step_is_that_of_its_calls(ranks: int) -> None:
    for found in run_on(ranks, False):
        usual, at_once = found["at once"]
        assert at_once == pytest.approx(usual, rel=1e-6)


@RANKS
def test_deepspeed_follows_a_change_of_the_train_batch(ranks: int) -> None:
    assert {found["resized"] for found in run_on(ranks, False)} == {(1, 1)}


def save_and_load(world: World, long: bool) -> dict[str, Any]:
    """For each case: the next losses of the engine that saved, of one like it that loaded, and of dsjob's that did."""
    found = {}
    for number, (name, stage, sections) in enumerate(SAVED):
        if not can_run(name) or (f"{name}, stage {stage}" in LONG) != long:
            continue
        shared: list[Any] = [tempfile.mkdtemp() if world.data_rank == 0 else None]
        if world.data_size > 1:
            torch.distributed.broadcast_object_list(shared)
        folder = f"{shared[0]}/{number}"
        first = make_engine(world, "deepspeed", stage, **sections)
        train_engine(first, 0, 3, ROWS)
        first.save_checkpoint(folder)
        before, state = first.loss_scale(), whole_state(first)
        sides = {"saved": (train_engine(first, 3, 2, ROWS), before, first.global_steps)}
        for side in ("deepspeed", "dsjob"):
            again = make_engine(world, side, stage, **sections)
            again.load_checkpoint(folder)
            same = all(torch.equal(value, state[key]) for key, value in whole_state(again).items())
            scale = again.loss_scale()
            sides[side] = (train_engine(again, 3, 2, ROWS), scale, again.global_steps, same)
            again.destroy()
        first.destroy()
        found[f"{name}, stage {stage}"] = sides
    return found


@RANKS
@pytest.mark.parametrize("name", [cell(f"{name}, stage {stage}") for name, stage, _ in SAVED])
def test_checkpoints_are_dsjobs_and_either_engine_goes_on(ranks: int, name: str) -> None:
    for rank in run_on(ranks, name in LONG):
        sides = rank["saved"][name]
        losses, scale, steps = sides["saved"]
        assert sides["deepspeed"] == (losses, scale, steps, True)
        found, their_scale, _, same = sides["dsjob"]
        assert same
        assert found == pytest.approx(losses, rel=1e-5 if name.startswith(("fp32", "offloaded")) else 4e-3)
        assert their_scale == scale


def begin_anew(world: World, stages: Iterable[int]) -> list[Any]:
    """Losses of an engine, and of one that has taken other steps and loads what that one saved before its first."""
    found = []
    for stage in stages:
        shared: list[Any] = [tempfile.mkdtemp() if world.data_rank == 0 else None]
        if world.data_size > 1:
            torch.distributed.broadcast_object_list(shared)
        first, other = make_engine(world, "deepspeed", stage), make_engine(world, "deepspeed", stage)
        first.save_checkpoint(shared[0])
        train_engine(other, 5, 2, ROWS)
        other.load_checkpoint(shared[0])
        found.append((train_engine(first, 0, 3, ROWS), train_engine(other, 0, 3, ROWS)))
        first.destroy()
        other.destroy()
    return found


LENGTHS = pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.full)])  # all stages, or two


@RANKS
@LENGTHS
def test_a_checkpoint_without_optimizer_state_begins_anew(ranks: int, long: bool) -> None:
    for rank in run_on(ranks, long):
        for first, other in rank["anew"]:
            assert other == first


def train_odd(world: World, stages: Iterable[int]) -> list[Any]:
    found = []
    for stage in stages:
        engine = make_engine(world, "deepspeed", stage, net=Odd())
        with torch.no_grad():
            evaluated = engine.eval()(torch.ones(2, 4))
        engine.train()
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4) * (1 + world.data_rank)))
            engine.step()
        state = engine.state()
        kept = {name: tensor.clone() for name, tensor in state.model_tensors().items()}
        found.append((float(evaluated), kept, state.aliases, sorted(state.optimizer_tensors())))
        engine.load_module_state_dict({name: value * 2 for name, value in engine.module_state_dict().items()})
        doubled = engine.state().model_tensors()
        assert all(torch.allclose(doubled[name], 2 * value) for name, value in kept.items())
        engine.destroy()
    return found


@LENGTHS
def test_frozen_tied_unused_parameters_and_buffers(long: bool) -> None:
    for rank in run_on(2, long):
        evaluated, first, aliases, _ = rank["odd"][0]
        assert aliases == {"tied.weight": "first.weight"}
        for other, kept, names, state in rank["odd"][1:]:
            assert other == pytest.approx(evaluated)
            assert names == aliases
            assert {name.split(".")[1] for name in state} == {"first", "unused", "tied"}
            for name, value in first.items():
                # An unused parameter is stepped by a gradient of zeros under sharding: weight decay alone.
                tolerance = 3e-3 if "unused" in name else 1e-6
                torch.testing.assert_close(kept[name], value, rtol=tolerance, atol=1e-6)


def refuse(world: World) -> list[str]:
    messages = []
    engine = make_engine(world, "deepspeed", 2)
    for call in (engine.offload_states, engine.no_sync().__enter__):
        with pytest.raises(UsageError) as caught:
            call()
        messages.append(caught.value.message)
    engine = make_engine(world, "deepspeed", 2, 2)
    train_engine(engine, 0, 1, ROWS)
    engine.zero_grad()
    x, y = make_tokens(1, ROWS // 2)
    engine.backward(engine(x, y))
    engine.step()
    with pytest.raises(UsageError) as caught:
        engine.zero_grad()
    messages.append(caught.value.message)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(world, "deepspeed", 2, 2)
        engine.save_checkpoint(folder)
        train_engine(engine, 0, 1, ROWS)
        engine.backward(engine(x, y))
        engine.step()
        with pytest.raises(UsageError, match="cannot drop gradients"):
            engine.load_checkpoint(folder)
        assert (engine.global_steps, engine.rhythm.done) == (1, 1)
    with pytest.raises(UsageError) as caught:
        make_engine(world, "deepspeed", 2, zero_optimization={"allgather_bucket_size": 5})
    messages.append(caught.value.message)
    with pytest.raises(UsageError) as caught:
        engine.divide_gradients(torch.ones(()))
    assert not engine.divides_gradients
    return [*messages, caught.value.message]


def test_what_deepspeed_does_not_do_is_told() -> None:
    (messages,) = run_ranks(refuse, 1)
    assert messages[0] == "engine: deepspeed cannot move states"
    assert messages[1] == "DeepSpeed supports no_sync only at stages 0 and 1"
    assert "cannot drop gradients in the middle of a step" in messages[2]
    assert messages[3].startswith("DeepSpeed refuses the job")
    assert messages[4] == "engine: deepspeed cannot divide gradients"


@pytest.mark.full
def test_a_job_runs_and_goes_on_by_either_engine(tmp_path: Path) -> None:
    make_job(tmp_path, zero_optimization={"stage": 2}, trainer={"train_batch": 8, "max_steps": 3, "log_every": 1})
    first = dsjob("cfg.json", "engine=deepspeed", "launch.nproc=2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "DeepSpeed" in first.stdout
    second = dsjob("run", "run", "trainer.max_steps=6", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    alone = dsjob("cfg.json", "trainer.max_steps=6", "launch.nproc=2", "output.dir=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    ours = read_metrics(tmp_path / "alone")
    assert len(ours) == 6
    assert read_metrics(tmp_path / "run") == pytest.approx(ours, rel=1e-5)
    assert math.isfinite(json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["eval/loss"])
