"""Pipelines give the numbers of one process: for every schedule, partition, topology, ZeRO stage and precision."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from pipelines import ROWS, deal, list_specs, make_engine, train
from ranks import run_ranks
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle

from dsjob.deepspeed.pipe import PipeDataParallelTopology, ProcessTopology
from dsjob.deepspeed.runtime.pipe.schedule import TrainSchedule
from dsjob.errors import LostRankError, UsageError
from dsjob.parallel.pipeline import messages
from dsjob.pipelines.orders import SCHEDULES
from dsjob.ranks.mesh import World, abandon_world

STEPS, FEW = 20, 6
Case = dict[str, Any]


def run(world: World, cases: list[Case], steps: int) -> list[Any]:
    found = []
    for case in cases:
        given = dict(case)
        name = given.pop("by", None)
        if name == "TrainSchedule":
            given["schedule"] = TrainSchedule
        elif name is not None:
            given["schedule"] = partial(SCHEDULES[name], chunks=given.get("chunks", 1))
        if "axes" in given:
            given["topology"] = ProcessTopology(*given.pop("axes"))
        stages = given.pop("stages", 1)
        data = world.everyone.size // stages
        found.append(train(make_engine(world, stages, micro=8 // data, **given), steps))
    return found


@cache
def run_alone(steps: int, **config: Any) -> Any:
    return run_ranks(run, 1, [{"config": {name: {"enabled": True} for name in config}}], steps)[0][0]


def compare(cases: list[Case], ranks: int, *, steps: int = STEPS, tolerance: float = 1e-5, **config: Any) -> None:
    alone = run_alone(steps, **config)
    whole = alone["weights"]
    for of_rank in run_ranks(run, ranks, cases, steps):
        for case, found in zip(cases, of_rank, strict=True):
            assert found["losses"] == pytest.approx(alone["losses"], rel=tolerance), case
            assert found["norms"] == pytest.approx(alone["norms"], rel=100 * tolerance), case
            assert found["eval"] == pytest.approx(alone["eval"], rel=tolerance), case
            assert found["weights"].keys() <= whole.keys()
            for name, tensor in found["weights"].items():
                torch.testing.assert_close(tensor, whole[name], rtol=0, atol=10 * tolerance)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]


each_length = pytest.mark.parametrize("steps", [FEW, pytest.param(STEPS, marks=pytest.mark.full)])

TWO: list[Case] = [
    {"stages": 2, "by": "1f1b"},
    {"stages": 2, "by": "gpipe", "partition_method": "uniform"},
    {"stages": 2, "by": "zero-bubble", "partition_method": "type:block"},
    {"stages": 2, "by": "interleaved", "chunks": 2},
]
MORE: list[Case] = [
    {"stages": 2, "by": "TrainSchedule", "partition_method": "time"},
    {"stages": 2, "by": "zero-bubble", "chunks": 3},
    {"stages": 2, "by": "interleaved", "chunks": 3},
    {"stages": 2, "activation_checkpoint_interval": 1},
    {"stages": 2, "activation_checkpoint_interval": 2, "by": "gpipe"},
]


@each_length
def test_every_schedule_gives_the_losses_of_one_process(steps: int) -> None:
    compare(TWO, 2, steps=steps)


@pytest.mark.full
def test_more_schedules() -> None:
    example = torch.zeros(4, 5, dtype=torch.int64)
    compare([{**case, "example": example} if case.get("partition_method") == "time" else case for case in MORE], 2)


FOUR: list[Case] = [
    {"stages": 2, "stage": 0},
    {"stages": 2, "stage": 1, "by": "interleaved", "chunks": 2},
    {"stages": 2, "stage": 2, "axes": (["data", "pipe"], [2, 2])},
]
FOUR_MORE: list[Case] = [
    {"stages": 2, "stage": 3},
    {"stages": 2, "stage": 1, "by": "zero-bubble"},
    {"stages": 2, "stage": 2, "by": "zero-bubble"},
    {"stages": 4, "by": "1f1b"},
    {"stages": 4, "by": "gpipe"},
    {"stages": 4, "by": "zero-bubble"},
    {"stages": 4, "by": "TrainSchedule"},
    {"stages": 2, "stage": 3, "activation_checkpoint_interval": 1},
    {"stages": 1, "stage": 1, "axes": (["pipe", "data"], [1, 4])},
]


@each_length
@pytest.mark.full
def test_pipelines_of_several_data_parallel_ranks(steps: int) -> None:
    compare(FOUR, 4, steps=steps)


@pytest.mark.full
def test_more_pipelines_on_four_ranks() -> None:
    compare(FOUR_MORE, 4)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_pipelines_on_eight_ranks(stage: int) -> None:
    cases = [{"stages": stages, "stage": stage, "layers": None} for stages in (2, 4)]
    compare([{k: v for k, v in case.items() if v is not None} for case in cases], 8)


@pytest.mark.full
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_chunks_in_half_precision(name: str) -> None:
    """tests/training/test_mesh_grid.py has one chunk in each precision."""
    case = {"stages": 2, "config": {name: {"enabled": True}}, "by": "interleaved", "chunks": 2}
    compare([case], 2, steps=FEW, tolerance=2e-2, **{name: True})


def overflow(world: World) -> list[Any]:
    """Only the first stage's gradients overflow: all stages skip the step, and lower their one loss scale."""
    config = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine = make_engine(world, 2, config=config)
    if engine.is_first_stage():
        for parameter in engine.module.parameters():
            parameter.register_hook(lambda gradient: gradient * float("inf"))
            break
    found = train(engine, 1)
    return [engine.skipped_steps, engine.loss_scale(), found["losses"]]


def test_an_overflow_on_one_stage_skips_the_step_on_all() -> None:
    first, second = run_ranks(overflow, 2)
    assert first == second
    assert first[:2] == [1, 8.0]


def catch(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except AttributeError as error:
        return error
    return None


def look_at_layers(world: World) -> dict[str, Any]:
    engine = make_engine(world, 2, layers=list_specs(6), partition_method="uniform")
    return {
        "names": sorted({name.split(".")[0] for name, _ in engine.module.named_parameters()}),
        "parts": engine.module.parts,
        "path": engine.module.ckpt_layer_path("folder", 1),
        "absent": str(catch(lambda: engine.module.save_state_dict("folder"))),
        "topology": isinstance(engine.module.topology(), PipeDataParallelTopology),
    }


def test_a_rank_builds_only_its_own_layers() -> None:
    first, last = run_ranks(look_at_layers, 2)
    assert (first["names"], last["names"]) == (["0", "1", "2", "3"], ["0", "4", "5", "6"])
    assert first["parts"] == last["parts"] == [0, 4, 8]
    assert (first["path"], last["path"]) == ("folder/layer_01-model_states.pt", "folder/layer_05-model_states.pt")
    assert first["topology"]
    assert "has no save_state_dict: call engine.save_checkpoint(folder)" in first["absent"]


def refuse(world: World) -> list[str]:
    said = []
    for given in (
        {"stages": 3},
        {"stages": None},
        {"stages": 2, "layers": [*list_specs(), "text"]},
        {"stages": 2, "partition_method": "time"},
        {"stages": 2, "partition_method": "memory"},
        {"stages": 2, "chunks": 4},
    ):
        with pytest.raises(UsageError) as found:
            make_engine(world, given.pop("stages"), **given)  # type: ignore[arg-type]
        said.append(found.value.message)
    return said


def test_mistakes() -> None:
    said = run_ranks(refuse, 2)
    assert (
        said[0]
        == said[1]
        == [
            "2 ranks do not divide into pipelines of 3 stages",
            "PipelineModule needs num_stages or topology",
            "layer 6 of the pipeline is str, which cannot be called",
            "partition_method time measures the layers, and needs inputs for them",
            "pipeline partition memory is unknown",
            "6 layers cannot be divided among 8 stages",
        ]
    )
    assert ROWS % 8 == 0


def train_on_device(world: World, by: str, chunks: int, config: dict[str, Any]) -> tuple[list[float], Any, list[str]]:
    """Losses of three steps, how often the host waits for the device in the last one, and memory used out of order."""
    device = find_device()
    schedule = partial(SCHEDULES[by], chunks=chunks)
    engine = make_engine(world, 2, schedule=schedule, chunks=chunks, config=config)
    batches, losses = deal(engine.world, 4, 3), []
    for _ in range(3):
        if device is not None:
            device.take_waits()
        losses.append(engine.train_batch(batches))
        waits = device.take_waits() if device is not None else {}
    return [float(loss) for loss in losses], waits, device.take_hazards() if device is not None else []


@pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")
@pytest.mark.parametrize(
    ("by", "chunks", "config", "waits"),
    [
        ("interleaved", 2, {}, {}),
        pytest.param("1f1b", 1, {"bf16": {"enabled": True}}, {"event": 1}, marks=pytest.mark.full),
        pytest.param("zero-bubble", 1, {}, {}, marks=pytest.mark.full),
    ],
)
def test_a_simulated_gpu_gives_the_losses_of_a_cpu_without_waiting(
    by: str, chunks: int, config: dict[str, Any], waits: dict[str, int]
) -> None:
    """Messages between two ranks pass one after the other, as with NCCL: a wrong order would never end."""
    ((expected, _, _), _) = run_ranks(train_on_device, 2, by, chunks, config)
    for losses, waited, hazards in run_ranks(train_on_device, 2, by, chunks, config, library=build()):
        assert losses == pytest.approx(expected, rel=2e-3 if config else 1e-6)
        assert (waited, hazards) == (waits, [])


def watch_sent(world: World) -> int:
    """How many tensors that were sent a rank keeps at most, in a step of 16 micro batches."""
    engine, kept = make_engine(world, 2, micro=16, schedule=SCHEDULES["1f1b"]), [0]
    mail = engine._passes._executor._mail
    send = mail.send

    def watch(*given: Any) -> None:
        send(*given)
        kept.append(len(mail._sent_by_device))

    mail.send = watch
    engine.train_batch(deal(engine.world, 16, 1))
    return max(kept)


@pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")
def test_what_has_arrived_is_not_kept_on_a_gpu() -> None:
    assert all(0 < kept <= 6 for kept in run_ranks(watch_sent, 2, library=build()))


def leave(world: World) -> tuple[str, float]:
    """The second of three stages closes its connections between two steps, as the system does when it is killed."""
    messages.PATIENCE = 0.5
    engine = make_engine(world, 3)
    batches = deal(engine.world, engine.micro_batches, 2)
    engine.train_batch(batches)
    if engine.stage_id == 1:
        abandon_world()
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(LostRankError) as found:
        engine.train_batch(batches)
    return found.value.message, time.monotonic() - started


def test_the_others_notice_that_a_stage_has_gone() -> None:
    first, _, last = run_ranks(leave, 3)
    for told, seconds in (first, last):
        assert "stage 1 of the pipeline has ended or cannot be reached" in told
        assert seconds < 20
