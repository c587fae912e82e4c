"""What log records say of the time that training takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_jobs
from ranks import run_ranks
from torch import Tensor

from dsjob.ranks.mesh import World
from dsjob.training import records


def test_the_time_that_is_left_counts_in_what_happens_beside_training(
    tmp_path: Path, hooks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    forward = small_jobs.Net.forward

    def take_a_second(net: small_jobs.Net, x: Tensor, y: Tensor) -> Tensor:
        now[0] += 1
        return forward(net, x, y)

    def dawdle(run: Any, step: int) -> None:
        now[0] += 10

    monkeypatch.setattr(records, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(small_jobs.Net, "forward", take_a_second)
    hooks.append(dawdle)
    small_jobs.train(tmp_path, trainer={"log_every": 2})
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples_per_second"] for line in found] == [8, 8, 8, 8]
    assert [line["eta_seconds"] for line in found] == [6, (1 + 10 / 4) * 4, (1 + 20 / 6) * 2, 0]


def train_with_peaks(world: World, folder: str) -> list[float]:
    if world.everyone.size > 1:
        records.read_peak = lambda device: [2**29, 5 * 2**29][world.everyone.rank]
    small_jobs.run(small_jobs.make_document(folder, trainer={"max_steps": 2}), world)
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["memory/peak_gib"] for line in lines]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_record_has_the_peak_of_memory_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    found = run_ranks(train_with_peaks, ranks, str(tmp_path))[0]
    if ranks == 2:
        assert found == [2.5, 2.5]
    else:  # a process that has imported torch
        assert 0.05 < found[0] <= found[1] < 50
