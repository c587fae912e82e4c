"""`deepspeed.ops.aio` reads and writes what was asked for, and says what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsjob.deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from dsjob.errors import StorageError, UsageError


def test_requests_move_each_part_of_a_file_to_its_place(tmp_path: Path) -> None:
    handle = AsyncIOBuilder().load().aio_handle(1024, 2, True, False, 2)
    numbers = torch.randn(5000)
    pinned = handle.new_cpu_locked_tensor(5000, numbers)
    pinned.copy_(numbers)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert handle.sync_pwrite(pinned, str(whole)) == 1
    assert handle.async_pwrite(numbers[2500:], str(halves), 10_000) == 0
    with halves.open("r+b") as file:
        assert handle.async_pwrite(numbers[:2500], fd=file.fileno()) == 0
        assert handle.wait() == 2
    assert whole.read_bytes() == halves.read_bytes() == numbers.numpy().tobytes()
    first, last = torch.empty(1000), torch.empty(4000)
    handle.async_pread(first, str(halves))
    handle.async_pread(last, str(whole), 4000)
    assert handle.wait() == 2
    assert torch.equal(torch.cat([first, last]), numbers)
    assert handle.read(pinned.zero_(), str(whole)) == 0
    assert torch.equal(pinned, numbers)
    assert handle.free_cpu_locked_tensor(pinned)


def test_locked_memory_is_known_to_all_handles_until_it_is_freed() -> None:
    files, pins = AsyncIOBuilder().load().aio_handle(), PinMemoryBuilder().load().pin_handle()
    made = pins.new_cpu_locked_tensor(10, torch.empty(0, dtype=torch.float64))
    assert made.dtype == torch.float64
    assert files.is_pinned(made[3:5])
    assert not files.is_pinned(torch.empty(10))
    assert files.free_cpu_locked_tensor(made)
    assert not pins.is_pinned(made)
    assert not pins.free_cpu_locked_tensor(made)


def test_mistakes_are_errors_with_the_file(tmp_path: Path) -> None:
    handle = AsyncIOBuilder().load().aio_handle()
    with pytest.raises(StorageError, match="missing: No such file"):
        handle.sync_pread(torch.empty(4), str(tmp_path / "missing"))
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    handle.async_pread(torch.empty(4), str(short))
    with pytest.raises(StorageError, match="short: it ends before byte 16"):
        handle.wait()
    with pytest.raises(UsageError, match=r"3 bytes, but the tensor 16"):
        handle.read(torch.empty(4), str(short))
    with pytest.raises(UsageError, match="must be contiguous"):
        handle.sync_pwrite(torch.empty(4, 4).t(), str(short))
    assert handle.wait() == 0
