"""Profiles of models without an engine, with DeepSpeed's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dsjob.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from dsjob.deepspeed.profiling.flops_profiler import profiler as profilers
from dsjob.errors import UsageError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times - 1):
            self.first(x)
        done: Tensor = self.rest(self.first(x))
        return done


FIRST, SECOND = 2 * 3 * 8 * 16, 2 * 3 * 16 * 4
SIZE = 8 * 16 + 16 + 16 * 4 + 4


def test_a_profile_counts_operations_macs_and_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Pair()
    total = FIRST + SECOND
    assert get_model_profile(model, (3, 8), as_string=False) == (total, total // 2, SIZE)
    told = capsys.readouterr().out
    (row,) = [line for line in told.splitlines() if line.startswith("first")]
    assert row.split()[:5] == ["first", "Linear", "144", f"{FIRST:,}", f"{FIRST / total:.1%}"]
    assert "operations  Linear 384" in told
    assert model.training
    given = {"args": [torch.ones(3, 8)], "kwargs": {"times": 3}}
    file = tmp_path / "new" / "profile.txt"
    found = get_model_profile(model, **given, output_file=str(file), ignore_modules=[nn.Sequential])  # type: ignore[arg-type]
    assert found == ("2.3 K", "1.15 KMACs", "212")
    assert capsys.readouterr().out == ""
    assert "rest.1" in file.read_text()


def test_a_profiler_goes_around_a_step_of_training() -> None:
    model, losses = Pair(), []
    profiler = FlopsProfiler(model)
    for step in range(3):
        if step == 1:
            profiler.start_profile(ignore_list=[nn.Linear])
        loss = model(torch.ones(3, 8)).sum()
        if step == 1:
            assert profiler.get_total_flops() == 0  # linear layers are left out
            assert profiler.get_total_duration() > 0
            profiler.end_profile()
        loss.backward()
        losses.append(loss)
    assert not profiler.started
    assert not model.first._forward_hooks
    assert profiler.get_total_flops() == 0


def test_numbers_have_deepspeed_s_units() -> None:
    assert profilers.number_to_string(1_500) == "1.5 K"
    assert profilers.number_to_string(0) == "0 "
    assert profilers.params_to_string(7_000_000_000) == "7 B"
    assert profilers.duration_to_string(0.0025) == "2.5 ms"
    assert profilers.macs_to_string(2e12, units="G") == "2000 GMACs"


def test_a_profile_needs_a_model_and_an_input() -> None:
    with pytest.raises(UsageError, match="needs an input"):
        get_model_profile(Pair())
    with pytest.raises(UsageError, match="input_shape is"):
        get_model_profile(Pair(), input_shape=[3, 8])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not int"):
        get_model_profile(3, (1,))  # type: ignore[arg-type]
