"""Ranks on the host keep freed memory: a buffer that each step allocates anew costs page faults only once."""

from __future__ import annotations

import platform
import resource

import pytest
import torch
from ranks import run_ranks

from dsjob.ranks.mesh import World


def count_faults(world: World) -> int:
    """Page faults of ten steps that each hold four buffers of 20 MB, after two that find their place."""
    for step in range(12):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(5_000_000) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limits")
def test_freed_memory_is_used_again() -> None:
    pages = 10 * 4 * 20_000_000 // resource.getpagesize()
    assert max(run_ranks(count_faults, 2)) < pages / 5
