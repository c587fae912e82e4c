"""What the tests of the front door share."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """A run refuses a process that has a group, and tests of other files leave theirs behind."""
    if dist.is_initialized():
        dist.destroy_process_group()
