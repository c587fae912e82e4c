"""A nameless file that threads read and write: its bytes, its errors, and what it leaves behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsjob.errors import StorageError
from dsjob.ops.disk import PAGE, Buffer, Piece, ScratchFile


def fill(size: int, seed: int = 0) -> Buffer:
    buffer = Buffer()
    buffer.reserve(size)
    generator = torch.Generator().manual_seed(seed)
    buffer.bytes.copy_(torch.randint(0, 256, (buffer.bytes.numel(),), dtype=torch.uint8, generator=generator))
    return buffer


@pytest.mark.parametrize("kind", ["disk", "memory", "unnamed files unsupported"])
def test_what_was_written_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In requests of many sizes, in another order, and through the mapping."""
    if kind == "memory" and not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    if kind == "unnamed files unsupported":
        monkeypatch.delattr(os, "O_TMPFILE")
    folder = "/dev/shm" if kind == "memory" else str(tmp_path / "new" / "folder")
    before = set(os.listdir(folder)) if kind == "memory" else set()
    file = ScratchFile(folder, block_size=3 * PAGE, requests=4)
    sizes = [5 * PAGE + 1, 1, PAGE, 20 * PAGE]
    offsets = [file.allocate(size) for size in sizes]
    spans = [-(-size // PAGE) * PAGE for size in sizes]
    assert offsets == [sum(spans[:n]) for n in range(4)]
    assert file.size == sum(spans)
    sent = fill(sum(spans))
    file.write([Piece(o, o, span) for o, span in zip(offsets, spans, strict=True)], sent).wait()
    got, start, pieces = Buffer(), 0, []
    got.reserve(sum(spans))
    for number in (2, 0, 3, 1):
        pieces.append(Piece(offsets[number], start, spans[number]))
        start += spans[number]
    file.read(pieces, got).wait()
    for piece in pieces:
        expected = sent.bytes[piece.offset : piece.offset + piece.size]
        assert torch.equal(got.bytes[piece.start : piece.start + piece.size], expected)
        mapped = file.map(piece.offset, piece.size)
        assert torch.equal(mapped, expected)
        mapped.fill_(7)  # what the mapping changes, a read sees, and the reverse
        file.read([piece], got).wait()
        assert got.bytes[piece.start : piece.start + piece.size].eq(7).all()
        got.bytes[piece.start : piece.start + piece.size].fill_(9)
        file.write([piece], got).wait()
        assert mapped.eq(9).all()
    assert not (set(os.listdir(folder)) - before), "the file has a name"


def answer(number: int) -> Callable[..., int]:
    def fail(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("call", "reply", "told"),
    [
        ("pwritev", answer(errno.ENOSPC), "write to .*No space left on device\n.*free space"),
        ("pwritev", answer(errno.EIO), "write to .*Input/output error\n.*check the folder and its disk"),
        ("preadv", answer(errno.EIO), "read from .*Input/output error"),
        ("preadv", lambda *args: 0, "read from .*no data at byte 0 of"),
        ("posix_fallocate", answer(errno.ENOSPC), "reserve 8,192 bytes in .*No space left"),
    ],
)
def test_errors_name_the_folder_and_the_cause(
    call: str, reply: Callable[..., int], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, buffer = ScratchFile(str(tmp_path), block_size=PAGE), fill(2 * PAGE)
    monkeypatch.setattr(os, call, reply)

    def move() -> None:
        piece = Piece(file.allocate(2 * PAGE), 0, 2 * PAGE)
        (file.read if call == "preadv" else file.write)([piece], buffer).wait()

    with pytest.raises(StorageError, match=told) as caught:
        move()
    assert str(tmp_path) in caught.value.message


def test_calls_that_move_less_than_asked_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sent, got = ScratchFile(str(tmp_path), block_size=8 * PAGE), fill(8 * PAGE), Buffer()
    got.reserve(8 * PAGE)
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, parts, at, whole=whole: whole(fd, [parts[0][:PAGE]], at))
    piece = Piece(file.allocate(8 * PAGE), 0, 8 * PAGE)
    file.write([piece], sent).wait()
    file.read([piece], got).wait()
    assert torch.equal(sent.bytes, got.bytes)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot create a file in .*file/below: Not a directory"):
        ScratchFile(str(tmp_path / "file" / "below"))
