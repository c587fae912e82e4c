"""`engine.compile`, which programs call after `initialize`, as accelerate does for `--torch_compile`."""

from __future__ import annotations

import pytest
import torch
from engines import make_deepspeed_engine, train_engine
from ranks import run_ranks

from dsjob.errors import ContractError, UsageError
from dsjob.ranks.mesh import World


def train_twice(world: World, stage: int, mode: str) -> tuple[list[float], list[float], int]:
    """Losses without and with compilation from the third step on, and the number of compiled graphs."""
    config = {"activation_checkpointing": {"mode": mode}}
    plain = train_engine(make_deepspeed_engine(stage, **config), 0, 4)
    engine = make_deepspeed_engine(stage, **config)
    losses = train_engine(engine, 0, 2)
    torch._dynamo.utils.counters.clear()
    engine.compile("eager", {"fullgraph": True, "backend": "inductor"})
    engine.compile("inductor")  # it is compiled already
    return plain, losses + train_engine(engine, 2, 2), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mode"), [(0, "full"), (3, "none")])
def test_a_compiled_engine_trains_as_before(stage: int, mode: str) -> None:
    for plain, compiled, graphs in run_ranks(train_twice, 2, stage, mode):
        assert compiled == pytest.approx(plain, rel=1e-6)
        assert graphs == 1  # of three blocks, which are alike


def test_what_cannot_be_compiled_is_refused() -> None:
    engine = make_deepspeed_engine(0)
    with pytest.raises(ContractError, match="torch has no backend inducktor"):
        engine.compile("inducktor")
    with pytest.raises(UsageError, match="does not support compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    with pytest.raises(UsageError, match="does not support a schedule of compiler passes"):
        engine.compile(schedule=[(0, [])])
    assert not engine.is_compiled
