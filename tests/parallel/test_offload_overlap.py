"""An offloaded optimizer on a simulated device: copies run beside the host's steps, and nothing is used too early."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from engines import make_engine, make_tokens
from machine import lacks_commands
from ranks import run_ranks
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle
from torch.utils._python_dispatch import TorchDispatchMode

from dsjob.engine.engine import Engine
from dsjob.parallel import masters
from dsjob.parallel.pairs import Pairs
from dsjob.ranks.mesh import World

LACKING = lacks_commands(os.environ.get("CXX", "c++"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")]


class Log(TorchDispatchMode):
    """What happens on the host, in order: `step`, `copy` to the device, and what the host waits for."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.told: list[str] = []
        device, optimizer = find_device(), engine.optimizer
        assert device is not None
        assert optimizer is not None
        device.extension.listen(self.told.append)
        kind = type(optimizer)
        step = kind.step

        def tell(*args: Any) -> Any:
            self.told.append("step")
            return step(*args)

        kind.step = tell  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_cuda and args[1].is_cpu:
            beside = torch.cuda.current_stream().stream_id != torch.cuda.default_stream().stream_id
            self.told.append("copy beside" if beside else "copy")
        return func(*args, **(kwargs or {}))


def offloaded(stage: int, ratio: float, kernels: str = "off") -> Engine:
    masters.PART = 1 << 10
    torch.manual_seed(0)
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    ops = {"cpu_optimizers": kernels}
    return make_engine(0, bf16=True, zero_optimization=zero, gradient_clipping=1.0, ops=ops)


def train(engine: Engine, step: int) -> None:
    x, y = (part[engine.world.data_rank * 2 :][:2].to(engine.device) for part in make_tokens(step, 4))
    engine.backward(engine(x, y))


def list_events(world: World, stage: int, ratio: float) -> list[str]:
    """Those of the second step."""
    engine = offloaded(stage, ratio)
    train(engine, 0)
    engine.step()
    train(engine, 1)
    with Log(engine) as log:
        engine.step()
    return log.told


@pytest.mark.parametrize(("world_size", "stage", "ratio"), [(1, 2, 1.0), (2, 1, 1.0), (2, 3, 1.0), (2, 3, 0.5)])
@pytest.mark.full("2-1-1.0", "2-3-1.0")
def test_copies_run_while_the_next_part_steps(world_size: int, stage: int, ratio: float) -> None:
    for told in run_ranks(list_events, world_size, stage, ratio, library=build()):
        first = told.index("step")
        assert told[:first].count("stream") == 1  # for all gradients at once, of which the norm is taken
        assert set(told[first:]) == {"step", "copy beside"}  # the host waits for nothing from there on
        steps = "".join("s" if event == "step" else "c" for event in told[first:]).split("s")[1:]
        assert len(steps) > 2
        assert all(steps)  # the weights of each part are on their way before the next one steps


def find_hazards(world: World, stage: int, broken: str) -> list[str]:
    """What three steps use in no order; `broken`: without what keeps the order."""
    device = find_device()
    assert device is not None
    if broken == "weights are not waited for":
        Pairs._join = lambda self: None  # type: ignore[method-assign]
    elif broken == "gradients are let go of":
        torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    engine = offloaded(stage, 1.0)
    for step in range(3):
        train(engine, step)
        engine.step()
    return device.take_hazards()


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 3)])
@pytest.mark.full("2-3")
def test_nothing_is_used_before_it_is_there(world_size: int, stage: int) -> None:
    def find(broken: str) -> list[str]:
        return run_ranks(find_hazards, world_size, stage, broken, library=build())[0]

    assert not find("")
    assert any(hazard.startswith("read by stream") for hazard in find("weights are not waited for"))
    assert any("that was freed" in hazard for hazard in find("gradients are let go of"))


def step_with(world: World, kernels: str) -> tuple[list[str], list[torch.Tensor], list[bool]]:
    """Hazards, masters, and whether each parameter has the new weights of its master."""
    device = find_device()
    assert device is not None
    engine = offloaded(2, 1.0, kernels)
    for step in range(3):
        train(engine, step)
        engine.step()
    found = dict(engine.module.named_parameters())
    kept = {name: master.detach() for name, master in engine.strategy.masters.items()}
    same = [torch.equal(found[name].cpu(), master.bfloat16()) for name, master in kept.items()]
    return device.take_hazards(), list(kept.values()), same


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_kernels_write_what_is_sent_to_the_device() -> None:
    (_, expected, _), (hazards, found, same) = (
        run_ranks(step_with, 1, kernels, library=build())[0] for kernels in ("off", "require")
    )
    assert hazards == []
    assert all(same)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def lend_the_device(world: World, zero: dict[str, Any], lends: bool) -> list[float]:
    torch.manual_seed(0)
    engine, losses = make_engine(0, bf16=True, zero_optimization=zero), []
    for step in range(4):
        x, y = (part[:2].to(engine.device) for part in make_tokens(step, 4))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if lends:
            engine.offload_states()
            engine.reload_states()
    return losses


@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
@pytest.mark.full("offload_optimizer")
def test_reloaded_states_leave_on_the_host_what_belongs_there(what: str) -> None:
    zero = {"stage": 3, what: {"device": "cpu"}}
    expected, found = (run_ranks(lend_the_device, 2, zero, lends, library=build()) for lends in (False, True))
    assert found == expected
