"""The engine on a simulated CUDA device: a CPU's losses, every use of memory in order, and how often the host waits."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from engines import make_engine, make_tokens
from ranks import run_ranks
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle

from dsjob.optim import on_disk
from dsjob.ranks.mesh import World

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")]

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
HOST = {"device": "cpu"}
DISK = {"device": "nvme", "nvme_path": f"{tempfile.gettempdir()}/dsjob", "max_in_cpu": 0, "buffer_count": 2}

Waits = dict[str, int]
READ: Waits = {"read": 1}
LATE: Waits = {"event": 1}  # of the step before, whose overflow flag has long been there
ARRIVE: Waits = {"stream": 1}  # for all gradients on their way to the host
ARRIVE_TWICE: Waits = {"stream": 2}  # and before for those of the micro step before
NORM: Waits = {"host to device": 1, "device to host": 1}  # of gradients on the host, which are summed up on the device


@dataclass(frozen=True)
class Case:
    """A config, and how often the host waits: in a micro step that is no boundary, and in one that is, of two steps."""

    config: dict[str, Any]
    micro: Waits = field(default_factory=dict)
    boundary: Waits = field(default_factory=dict)
    alone: tuple[Waits, Waits] | None = None  # both, on one rank, where that differs; None: as on several


def at(stage: int, *parts: dict[str, Any], **zero: Any) -> dict[str, Any]:
    """A config at a ZeRO stage."""
    made: dict[str, Any] = {"zero_optimization": {"stage": stage, **zero}, "gradient_clipping": 1.0}
    for part in parts:
        made |= part
    return made


def step_with(kind: str, **params: Any) -> dict[str, Any]:
    """An optimizer's part of a config."""
    return {"optimizer": {"type": kind, "params": {"lr": 0.01, **params}}}


STAGES = {
    f"{name}, stage {stage}": Case(at(stage, part), boundary=waits)
    for stage in range(4)
    for name, part, waits in (
        ("fp32", {}, {}), ("bf16", BF16, LATE), ("fp16", FP16, READ), ("autocast", AUTOCAST, {}),
    )
}  # fmt: skip

OFFLOADED = {
    "optimizer, stage 1": Case(
        at(1, BF16, offload_optimizer=HOST),
        boundary={**ARRIVE, **NORM},
        alone=({}, ARRIVE),
    ),
    "optimizer, stage 2": Case(
        at(2, BF16, offload_optimizer=HOST),
        boundary={**ARRIVE_TWICE, **NORM},
        alone=({}, ARRIVE_TWICE),
    ),
    "optimizer, fp32": Case(at(3, offload_optimizer=HOST), boundary={**ARRIVE_TWICE, **NORM}, alone=({}, ARRIVE_TWICE)),
    "optimizer, fp16": Case(
        at(3, FP16, offload_optimizer=HOST), boundary={**ARRIVE_TWICE, **NORM}, alone=({}, ARRIVE_TWICE)
    ),
    "half of the optimizer": Case(
        at(3, BF16, offload_optimizer={**HOST, "ratio": 0.5}),
        boundary={**ARRIVE_TWICE, "read": 1, "host to device": 1, "device to host": 2},
        alone=({}, {**ARRIVE_TWICE, "read": 1, "device to host": 1}),
    ),
    "optimizer, pageable": Case(
        at(3, BF16, offload_optimizer={**HOST, "pin_memory": False}),
        micro={"device to host": 19},
        boundary={"host to device": 20, "device to host": 20},
        alone=({"device to host": 19}, {"device to host": 19, "host to device": 19}),
    ),
    "parameters": Case(
        at(3, BF16, offload_param=HOST),
        micro={"event": 19},
        boundary={"host to device": 1, "device to host": 20},
    ),
    "parameters on a disk": Case(
        at(3, BF16, offload_param=DISK),
        micro={"event": 19},
        boundary={"host to device": 1, "device to host": 20},
    ),
}

GROUPS = {
    "MiCS": Case(at(3, BF16, mics_shard_size=1), boundary=LATE),
    "MiCS, half of the optimizer offloaded": Case(
        at(3, BF16, mics_shard_size=1, offload_optimizer={**HOST, "ratio": 0.5}),
        boundary={**ARRIVE_TWICE, "read": 1, "host to device": 1, "device to host": 2},
    ),
    "hpZ": Case(at(3, BF16, zero_hpz_partition_size=1), boundary=LATE),
    "bf16, reduced in fp32": Case(at(0, BF16, {"communication_data_type": "fp32"}), boundary=LATE),
    "bf16, summed in fp32": Case(at(0, BF16, {"data_types": {"grad_accum_dtype": "fp32"}}), boundary=LATE),
    "autocast, predivided": Case(at(0, AUTOCAST, {"prescale_gradients": False, "gradient_predivide_factor": 4.0})),
}

OPTIMIZERS = {
    "Lion": Case(at(3, BF16, step_with("Lion")), boundary=READ),
    "Lamb": Case(at(3, BF16, step_with("Lamb")), boundary=READ),
    "Muon": Case(at(3, BF16, step_with("Muon")), boundary=READ),
    "Muon, offloaded": Case(
        at(3, BF16, step_with("Muon"), offload_optimizer=HOST),
        boundary={
            **ARRIVE_TWICE,
            "host to device": 9,
            "device to host": 9,
        },  # each of 8 matrices is gathered on the device
    ),
    "Lamb, half offloaded": Case(
        at(3, BF16, step_with("Lamb"), offload_optimizer={**HOST, "ratio": 0.5}),
        boundary={**ARRIVE_TWICE, "read": 1, "host to device": 14, "device to host": 27},  # a ratio for each parameter
    ),
    "Muon, stage 0": Case(at(0, BF16, step_with("Muon")), boundary=READ),
    "SGD": Case(at(2, step_with("SGD"))),
    "OneBitAdam": Case(at(0, step_with("OneBitAdam", freeze_step=2)), boundary={"host to device": 4}),
    "ZeroOneAdam": Case(at(0, step_with("ZeroOneAdam", var_freeze_step=2)), boundary={"host to device": 4}),
}

RECOMPUTED = {
    f"recomputed, stage {stage}": Case(at(stage, BF16, {"activation_checkpointing": {"mode": "full"}}), boundary=LATE)
    for stage in (0, 3)
}

CASES = {
    "stages": STAGES,
    "stages in two dtypes": {name: case for name, case in STAGES.items() if name.startswith(("fp32", "bf16"))},
    "offloaded": OFFLOADED,
    "groups": GROUPS,
    "optimizers": OPTIMIZERS,
    "recomputed": RECOMPUTED,
}


def train_all(world: World, group: str) -> dict[str, Any]:
    """What `train` gives for each config of a group."""
    return {name: train(world, case.config) for name, case in CASES[group].items()}


def train(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """Three steps of two micro steps: losses, norms, and on a simulated device what it has noticed."""
    device = find_device()
    torch.manual_seed(0)
    on_disk.SMALL = 128
    engine = make_engine(0, accumulation=2, **config)
    losses, norms, waits = [], [], []
    for step in range(3):
        for micro in range(2):
            start = (2 * micro + world.data_rank) * 2
            x, y = (part[start : start + 2].to(engine.device) for part in make_tokens(step, 8))
            if device is not None:
                device.take_waits()
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            waits.append(device.take_waits() if device is not None else {})
            losses.append(loss.detach())
        norms.append(engine.get_global_grad_norm())
    found = {"losses": [float(loss) for loss in losses], "norms": norms, "waits": waits[-2:], "device": engine.device}
    engine.destroy()
    return {**found, "hazards": device.take_hazards() if device is not None else []}


@cache
def run_group(group: str, world_size: int, simulated: bool) -> list[dict[str, Any]]:
    return run_ranks(train_all, world_size, group, library=build() if simulated else None)


@pytest.mark.parametrize(
    ("group", "world_size", "name"),
    [
        *(("stages", 1, name) for name in STAGES),
        *(("offloaded", 1, name) for name in OFFLOADED),
        *(pytest.param(group, 2, name, marks=pytest.mark.full) for group in CASES for name in CASES[group]),
    ],
)
def test_the_engine_on_a_device(group: str, world_size: int, name: str) -> None:
    case = CASES[group][name]
    close = 1e-5 if not case.config.keys() & {"bf16", "fp16"} else 2e-2  # the device's half precision rounds elsewhere
    for rank in range(world_size):
        expected, found = (run_group(group, world_size, simulated)[rank][name] for simulated in (False, True))
        assert found["device"] == torch.device("cuda", rank)
        assert found["losses"] == pytest.approx(expected["losses"], abs=close)
        assert found["norms"] == pytest.approx(expected["norms"], abs=close)
        assert not found["hazards"]
        micro, boundary = case.alone if world_size == 1 and case.alone is not None else (case.micro, case.boundary)
        assert found["waits"] == [micro, boundary]


def overflow(world: World, stage: int, asks: bool) -> dict[str, Any]:
    """Six steps with a schedule, two of them not finite; what the program is told, asking each time or at the end."""
    torch.manual_seed(0)
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = make_engine(0, **at(stage, BF16, {"scheduler": warm_up}))
    told, losses = [], []
    for step in range(6):
        start = 2 * world.data_rank
        x, y = (part[start : start + 2].to(engine.device) for part in make_tokens(step, 8))
        loss = engine(x, y)
        engine.backward(loss * (torch.inf if step in (2, 5) else 1.0))
        engine.step()
        losses.append(loss.detach())
        if asks:
            told.append((engine.was_step_applied(), engine.skipped_steps, engine.get_lr()))
    counted = engine.counters()
    kept = engine.state().scheduler
    last = (engine.was_step_applied(), engine.get_lr(), None if kept is None else kept.last_epoch)
    return {"losses": [float(loss) for loss in losses], "told": told, "counted": counted, "last": last}


@pytest.mark.parametrize(
    ("world_size", "stage", "asks"),
    [
        (1, 0, True),
        (2, 3, False),
        *(
            pytest.param(*other, marks=pytest.mark.full)
            for other in ((1, 0, False), (2, 0, True), (2, 0, False), (2, 3, True))
        ),
    ],
)
@pytest.mark.full("2-3-False")
def test_an_overflow_is_told_late_and_changes_nothing(world_size: int, stage: int, asks: bool) -> None:
    expected = run_ranks(overflow, world_size, stage, asks)
    found = run_ranks(overflow, world_size, stage, asks, library=build())
    for before, after in zip(expected, found, strict=True):
        assert after.pop("losses") == pytest.approx(before.pop("losses"), abs=2e-2)
        assert after == before
    assert expected[0]["counted"]["skipped_steps"] == 2
