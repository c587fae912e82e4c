"""What the tests of the front door share."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from programs import Rank

from dsjob.launch import supervisor


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """A run refuses a process that has a group, and tests of other files leave theirs behind."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a run in the test's own process are forks. Those of a notebook or a new interpreter are not."""
    monkeypatch.setattr(supervisor, "start_process", Rank)
