"""That ZeRO's stages and offloading take from each rank what they should: the benchmark's figures, on real ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import run_ranks

from dsjob.ranks.mesh import World


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    found = importlib.util.spec_from_file_location("memory_benchmark", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def measure(world: World) -> dict[tuple[int, str], dict[str, dict[str, float]]]:
    """Bytes a parameter, by stage and way to offload, on device and host."""
    benchmark = load_benchmark()
    found: dict[tuple[int, str], Any] = {}
    for stage in range(4):
        for offload in benchmark.WAYS:
            if benchmark.is_meaningful(stage, offload):
                model = benchmark.Transformer(1024, 64, 3)
                size = sum(p.numel() for p in model.parameters())
                bytes_ = benchmark.measure(stage, offload, model)
                found[stage, offload] = {
                    place: {kind: number / size for kind, number in kinds.items()} for place, kinds in bytes_.items()
                }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.full("4")
def test_each_stage_takes_its_part_from_every_rank(ranks: int) -> None:
    """In bf16 with two micro batches: bytes a parameter of parameters, gradients, and masters with Adam's moments."""
    n = ranks
    whole, shard = (2, 4, 12), (2 if n == 1 else 0, 4 if n == 1 else 4 / n, 12 / n)
    device = {
        (0, "none"): whole,
        (1, "none"): (2, 4 if n == 1 else 2, 12 / n),
        (2, "none"): (2, 4 / n, 12 / n),
        (3, "none"): shard,
        (1, "optimizer"): (2 + (2 / n if n > 1 else 0), 2, 0),
        (2, "optimizer"): (2 + (2 / n if n > 1 else 0), 0, 0),
        (3, "optimizer"): (2 / n, 0, 0),
        (3, "param"): (0, 0, 0),
    }
    for found in run_ranks(measure, n):
        assert set(found) == set(device)
        for key, expected in device.items():
            assert tuple(found[key]["device"].values()) == pytest.approx(expected, rel=0.03), key
            held = 0 if key[1] == "none" else 16 / n
            assert sum(found[key]["host"].values()) == pytest.approx(held, rel=0.03), key
