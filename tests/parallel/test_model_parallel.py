"""Engines under a model-parallel unit: four ranks, two of which hold a model together, against one rank alone."""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import DeepSpeedUnit, ParallelNet, Unit, build_part, build_whole, make_rows, put_together
from torch import Tensor, nn

import dsjob
from dsjob import checkpointing, deepspeed
from dsjob.deepspeed import DeepSpeedEngine
from dsjob.deepspeed.utils import groups
from dsjob.errors import CheckpointError, UsageError
from dsjob.parallel import zero
from dsjob.parallel.zero_init import Init
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
CLIPS = (0.0, 0.05)
CELLS = list(product(STAGES, CLIPS))
SOME = [(1, 0.0), (2, 0.05), (3, 0.05)]  # `init` is (3, 0.0)
STEPS, ROWS, MICRO = 3, 8, 2
ADAM: dict[str, Any] = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}
Outcome = dict[str, Any]


def make_config(stage: int, clip: float = 1.0, **more: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": MICRO}
    shape = {"zero_optimization": {"stage": stage, **more.pop("zero", {})}, "gradient_clipping": clip}
    return {**sizes, "optimizer": ADAM, **shape, **more}


def make_engine(unit: Unit, stage: int, clip: float = 1.0, **more: Any) -> DeepSpeedEngine:
    return deepspeed.initialize(model=build_part(unit), config=make_config(stage, clip, **more), mpu=unit)[0]


def train(engine: DeepSpeedEngine, steps: range = range(STEPS)) -> tuple[list[float], list[float]]:
    """Losses of the whole batches (the mean over data-parallel ranks is the caller's) and norms."""
    losses, norms = [], []
    accumulation = engine.rhythm.accumulation
    for step in steps:
        x, y = make_rows(step, ROWS)
        own = [part.chunk(accumulation * engine.world.data_size) for part in (x, y)]
        total = 0.0
        for micro in range(accumulation):
            place = micro * engine.world.data_size + engine.world.data_rank
            loss = engine(own[0][place], own[1][place])
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def read(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {n: t for n, t in engine.module_state_dict().items() if not n.endswith("seen")}


def train_alone() -> dict[float, Outcome]:
    """Plain PyTorch on whole batches."""
    found = {}
    for clip in CLIPS:
        net = build_whole()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
        losses, norms = [], []
        for step in range(STEPS):
            loss = net(*make_rows(step, ROWS))
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found[clip] = {"losses": losses, "norms": norms, "weights": dict(net.named_parameters())}
    return found


def run_all(world: World, folder: str, whole: bool) -> Outcome:
    """Everything that one world of four ranks is needed for."""
    unit = DeepSpeedUnit()
    found: Outcome = {}
    for stage, clip in CELLS if whole else SOME:
        engine = make_engine(unit, stage, clip)
        losses, norms = train(engine)
        found["train", stage, clip] = {"losses": losses, "norms": norms, "weights": read(engine)}
        found["seen", stage] = [float(block.seen) for block in engine.module.blocks]
    found["sizes"] = (
        engine.world_size, engine.dp_world_size, engine.mp_world_size, engine.global_rank, engine.train_batch_size(),
        engine.gradient_accumulation_steps(), engine.data_parallel_group is unit.get_data_parallel_group(),
    )  # fmt: skip
    found["groups"] = (
        groups.get_data_parallel_rank(), groups.get_data_parallel_world_size(), groups.get_model_parallel_rank(),
        groups.get_model_parallel_world_size(), groups.get_data_parallel_group() is unit.get_data_parallel_group(),
    )  # fmt: skip
    found["own data"] = [float(sample[0]) for sample in engine.deepspeed_io(list(torch.arange(8.0)), route="eval")]
    make_engine(unit, 0, activation_checkpointing={"partition_activations": True})
    found["stores"] = checkpointing._setup.store._group is unit.get_model_parallel_group()
    found["offloaded"] = train(make_engine(unit, 2, zero={"offload_optimizer": {"device": "cpu"}}))
    found["plain"] = train(make_engine(unit, 0))
    for name, stages, more in (
        ("bf16", (3, 0), {"bf16": {"enabled": True}}),
        ("fp16", (0, 3), {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ):
        found[name] = [train(make_engine(Unit(), stage, **more)) for stage in stages[: 2 if whole else 1]]
    stages = STAGES if whole else (0, 3)
    found["overflow"] = [*(overflow(unit, stage) for stage in stages), overflow(unit, 0, counted=False)]
    found["init"] = shard_while_building(unit)
    found["resumed"] = [resume(unit, stage, f"{folder}/{stage}") for stage in (STAGES if whole else (0,))]
    found["refused"] = refuse(unit, f"{folder}/0")
    return found


def overflow(unit: Unit, stage: int, counted: bool = True) -> list[Any]:
    """A step in which gradients of one part of the model overflow: all ranks leave it out.

    Not `counted`: in a parameter that only the other part counts in the norm.
    """
    engine = make_engine(unit, stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    x, y = make_rows(0, ROWS)
    if not counted and engine.world.model.rank == 1:
        engine.module.head.bias.register_hook(lambda gradient: gradient * float("inf"))
    loss = engine(x[:MICRO], y[:MICRO])
    if counted and engine.world.data_rank == 1 and engine.world.model.rank == 1:
        loss = loss * 1e9
    engine.backward(loss)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return [engine.was_step_applied(), engine.skipped_steps, engine.loss_scale()]


class Applied(nn.Module):
    """Initialised by a function, with a value of its own on each part."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.apply(lambda module: module.weight.data.fill_(value))


def shard_while_building(unit: Unit) -> Outcome:
    with Init(mpu=unit):
        net = build_part_sharded(unit)
        applied = Applied(1.0 + unit.get_tensor_model_parallel_rank())
    with zero.GatheredParameters(applied.weight):
        initial = applied.weight.detach().clone().tolist()
    edited = net.head.bias
    with zero.GatheredParameters(edited, modifier_rank=0):
        if unit.get_data_parallel_rank() == 0:
            edited.data.fill_(0.25 * unit.get_tensor_model_parallel_rank())
    with zero.GatheredParameters(edited):
        value = edited.detach().clone()
    part = dict(build_part(unit).named_parameters())
    for name, parameter in net.named_parameters():
        with zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(part[name])
    engine = dsjob.initialize(model=net, config=make_config(3, CLIPS[0]), mpu=unit)[0]
    losses, norms = train(engine)
    rows = {name: tuple(p.to_local().shape) for name, p in engine.module.named_parameters()}
    return {"initial": initial, "value": value, "losses": losses, "norms": norms, "weights": read(engine), "rows": rows}


def build_part_sharded(unit: Unit) -> ParallelNet:
    return ParallelNet(unit.get_tensor_model_parallel_group(), unit.get_tensor_model_parallel_world_size())


def resume(unit: Unit, stage: int, folder: str) -> tuple[Any, Any, list[str]]:
    """Losses of a run, and of one that is saved in its midst and goes on at another stage."""
    engine = make_engine(unit, stage)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    again = make_engine(unit, (stage + 1) % 4)
    url, _ = again.load_checkpoint(folder)
    assert url is not None
    return train(engine, range(2, 4)), train(again, range(2, 4)), sorted(again.state().model_tensors())


def refuse(unit: Unit, folder: str) -> dict[str, str]:
    class Other(DeepSpeedUnit):
        def get_data_parallel_world_size(self) -> int:
            return 4

    class Lost(DeepSpeedUnit):
        def get_data_parallel_rank(self) -> int:
            return 1 - super().get_data_parallel_rank()

    def call(name: str, action: Any) -> None:
        with pytest.raises((UsageError, CheckpointError)) as caught:
            action()
        told[name] = f"{caught.value.message}. {caught.value.hint}"

    told: dict[str, str] = {}
    net = build_whole()
    call("size", lambda: dsjob.initialize(model=net, config=make_config(0), mpu=Other()))
    call("rank", lambda: dsjob.initialize(model=net, config=make_config(0), mpu=Lost()))
    call("methods", lambda: dsjob.initialize(model=net, config=make_config(0), mpu=object()))
    call("1-bit", lambda: make_engine(unit, 0, optimizer={"type": "OneBitAdam", "params": {"lr": 0.01}}))
    call("hpz", lambda: make_engine(unit, 3, zero={"zero_hpz_partition_size": 2}))
    with Init():
        sharded = build_part_sharded(unit)
    call("init", lambda: dsjob.initialize(model=sharded, config=make_config(3), mpu=unit))
    call("16bit", lambda: make_engine(unit, 0).save_16bit_model(folder))
    whole = dsjob.initialize(model=net, config={**make_config(0), "train_batch_size": 8})[0]
    call("load", lambda: whole.load_checkpoint(folder))
    return told


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.full)])
def results(request: pytest.FixtureRequest) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_all, 4, folder, request.param == "all")


def test_every_stage_gives_what_the_whole_model_gives_on_one_rank(results: list[Outcome]) -> None:
    alone = train_alone()
    for _, stage, clip in (key for key in results[0] if key[0] == "train"):
        found = [result["train", stage, clip] for result in results]
        losses = [(found[0]["losses"][i] + found[2]["losses"][i]) / 2 for i in range(STEPS)]
        assert losses == pytest.approx(alone[clip]["losses"], rel=1e-6), (stage, clip)
        for one in found:
            assert one["norms"] == pytest.approx(alone[clip]["norms"], rel=1e-6), (stage, clip)
        for first in (0, 2):
            whole = put_together([one["weights"] for one in found[first : first + 2]])
            for name, weight in alone[clip]["weights"].items():
                torch.testing.assert_close(whole[name], weight.detach(), rtol=0, atol=2e-6, msg=f"{stage} {name}")


def test_sizes_data_and_buffers_are_those_of_the_data_parallel_ranks(results: list[Outcome]) -> None:
    for rank, result in enumerate(results):
        assert result["sizes"] == (4, 2, 2, rank, ROWS, 2, True)
        assert result["groups"] == (rank // 2, 2, rank % 2, 2, True)
        assert result["own data"] == ([0.0, 4.0] if rank < 2 else [2.0, 6.0])
        assert result["stores"]
        for stage in (1, 2, 3):
            assert result["seen", stage] == [6.0, 6.0]


def test_other_precisions_and_offloading_stay_near(results: list[Outcome]) -> None:
    for result in results:
        losses, norms = result["plain"]
        assert result["offloaded"] == (pytest.approx(losses, rel=1e-6), pytest.approx(norms, rel=1e-5))
        for name, tolerance in (("bf16", 0.01), ("fp16", 1e-3)):
            for other in result[name]:
                assert other == (pytest.approx(losses, rel=tolerance), pytest.approx(norms, rel=tolerance)), name


def test_an_overflow_in_one_part_is_left_out_by_all_ranks(results: list[Outcome]) -> None:
    for result in results:
        assert len(result["overflow"]) >= 3
        assert all(found == [False, 1, 128.0] for found in result["overflow"])


def test_models_are_sharded_over_the_data_parallel_ranks_as_they_are_built(results: list[Outcome]) -> None:
    alone = train_alone()[CLIPS[0]]
    for rank, result in enumerate(results):
        found = result["init"]
        assert found["initial"] == [1.0 + rank % 2] * 4
        assert found["value"].tolist() == [0.25 * (rank % 2)] * 3
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert found["rows"]["blocks.0.column.weight"] == (2, 6)
        assert found["rows"]["blocks.0.row.weight"] == (3, 4)
    whole = put_together([result["init"]["weights"] for result in results[:2]])
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(whole[name], weight.detach(), rtol=0, atol=2e-6, msg=name)


def test_a_checkpoint_keeps_the_parts_apart_and_loads_at_any_stage(results: list[Outcome]) -> None:
    for result in results:
        for expected, found, names in result["resumed"]:
            assert found == (pytest.approx(expected[0], rel=1e-6), pytest.approx(expected[1], rel=1e-5))
            assert "model.blocks.0.column.weight" in names


def test_what_does_not_fit_is_refused_with_reasons(results: list[Outcome]) -> None:
    told = results[0]["refused"]
    assert "4 data-parallel x 2 model-parallel ranks, but the job has 4" in told["size"]
    assert "data-parallel rank 1 of 2, but in its group this is rank 0 of 2" in told["rank"]
    assert "get_data_parallel_{rank,world_size,group}()" in told["methods"]
    assert "OneBitAdam averages over all ranks" in told["1-bit"]
    assert "zero_hpz_partition_size is 2" in told["hpz"]
    assert "zero.Init(mpu=mpu)" in told["init"]
    assert "dsjob convert --model mp_rank_00" in told["16bit"]
    assert "was saved with 2 model-parallel ranks; this run has 1" in told["load"]
