"""Optimizer state on a disk against the same optimizer in memory, to the bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsjob.errors import StorageError
from dsjob.ops.disk import ScratchFile
from dsjob.optim.lion import Lion
from dsjob.optim.on_disk import SMALL, StateOnDisk
from dsjob.optim.parts import step_own_parts

KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lion": lambda p: Lion(p, lr=0.1),
}


def make_parameters() -> list[nn.Parameter]:
    """Large ones, which go to the disk, and one that is too small."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(130, 200), (5,), (SMALL // 4 + 1,), (400, 90), (3, 100, 100)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, disk: StateOnDisk | None) -> None:
    for step in range(4):
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * step + number)
            # One parameter gets its first gradient in the third step: its state is created beside others' reads.
            if number != 3 or step > 1:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        if disk is None:
            optimizer.step()
        else:
            parts = [[p] for p in parameters if p.grad is not None]
            disk.step(optimizer, parts, step_own_parts, lambda number: None)
        optimizer.zero_grad()


@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_an_optimizer_in_memory(kind: str, buffers: int, tmp_path: Path) -> None:
    ours, theirs = make_parameters(), make_parameters()
    file = ScratchFile(str(tmp_path))
    on_disk, in_memory = KINDS[kind](ours), KINDS[kind](theirs)
    train(ours, on_disk, StateOnDisk(file, file, buffers))
    train(theirs, in_memory, None)
    assert file.size >= sum(p.nbytes for p in ours if p.nbytes >= SMALL)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
        for key, value in in_memory.state[other].items():
            assert torch.equal(on_disk.state[own][key], value), key


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make_parameters()
    optimizer, disk = torch.optim.AdamW(parameters), StateOnDisk(None, ScratchFile(str(tmp_path)), 2)
    train(parameters, optimizer, disk)

    def fail(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(StorageError, match="No space left"):
        train(parameters, optimizer, disk)
