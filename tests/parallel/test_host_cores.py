"""How many threads a rank computes with on the host."""

from __future__ import annotations

import os

import pytest
import torch

from dsjob.parallel.masters import use_cores


@pytest.mark.parametrize(
    ("device", "before", "cores", "ranks", "threads"),
    [
        ("cuda", 1, 64, "8", 8),  # as under torchrun
        ("cuda", 4, 64, "8", 4),  # somebody's own choice
        ("cuda", 1, 4, "8", 1),
        ("cuda", 1, 6, "", 6),
        ("cpu", 1, 64, "8", 1),  # where other ranks compute on the same cores all the time
    ],
)
def test_an_offloaded_optimizer_uses_the_ranks_share_of_the_cores(
    device: str, before: int, cores: int, ranks: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_to[-1] if set_to else before)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    use_cores(torch.device(device))
    assert torch.get_num_threads() == threads
