"""Saves that fail, and housekeeping that does: what is told, what stays, and what is tried again."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_jobs
from small_jobs import at_step, list_steps, read_digests, send, train

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.errors import StorageError
from dsjob.training import occasions

pytestmark = pytest.mark.usefixtures("hooks")


def fail_once(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = storage.open_write

    def open_write(url: str) -> Any:
        if f"step-{step:08d}" in url:
            raise StorageError(f"cannot write {url}: no space")
        return original(url)

    monkeypatch.setattr(storage, "open_write", open_write)


@pytest.mark.parametrize("behind", [False, True])
def test_a_save_that_fails_ends_the_run_or_is_told(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_once(monkeypatch, 4)
    checkpoint = {"every": 2, "keep": 0, "async": behind}
    with pytest.raises(StorageError, match=r"step-00000004.*no space"):
        train(tmp_path / "stop", checkpoint=checkpoint)
    assert list_steps(tmp_path / "stop") == [2]
    train(tmp_path / "warn", checkpoint={**checkpoint, "save_on_error": "warn"})
    assert list_steps(tmp_path / "warn") == [2, 6, 8]
    assert "not saved" in capsys.readouterr().out
    assert read_digests(tmp_path / "warn", 8) == read_digests(whole, 8)
    names = os.listdir(tmp_path / "warn" / "checkpoints")
    assert not [name for name in names if name.startswith("step-00000004")]


@pytest.mark.parametrize("behind", [False, True])
def test_a_limit_on_files_leaves_the_checkpoint_before_whole(tmp_path: Path, hooks: list[Any], behind: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        end = time.monotonic() + 60
        while not list_steps(tmp_path):
            assert time.monotonic() < end
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))

    hooks.append(at_step(3, limit))
    model = {"_target_": "small_jobs.Net", "width": 64}
    try:
        with pytest.raises(StorageError, match="File too large"):
            train(tmp_path, model=model, checkpoint={"every": 2, "async": behind})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_steps(tmp_path) == [2]
    hooks.clear()
    train(tmp_path, model=model, checkpoint={"every": 2})
    assert list_steps(tmp_path) == [6, 8]


CALLS = ["open", "write", "fsync", "link", "replace", "makedirs"]
NAMES = ["EIO", "EROFS", "EDQUOT", "ENOSPC"]


@pytest.mark.full(*(f"{call}-{name}" for n, call in enumerate(CALLS) for name in (NAMES[n % 2 :: 2])))
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EDQUOT, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_whatever_call_fails_the_error_is_typed_and_what_was_saved_stays(
    tmp_path: Path, hooks: list[Any], call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    def begin() -> None:
        if call == "write":
            monkeypatch.setattr(storage._Renamed, "write", lambda self, data: _raise_renamed(self._url, fail))
        else:
            monkeypatch.setattr(storage.os, call, _below(str(tmp_path / "checkpoints"), getattr(os, call), fail))

    hooks.append(at_step(3, begin))
    with pytest.raises(StorageError, match=os.strerror(number)):
        train(tmp_path, checkpoint={"every": 2})
    monkeypatch.undo()
    hooks.clear()
    assert 2 in list_steps(tmp_path)
    train(tmp_path, checkpoint={"every": 2, "keep": 0})
    assert list_steps(tmp_path) == [2, 4, 6, 8]


def _raise_renamed(url: str, fail: Callable[[], None]) -> None:
    with storage._renamed("write", url):
        fail()


def _below(folder: str, original: Callable[..., Any], fail: Callable[[], None]) -> Callable[..., Any]:
    """`original`, but for what is below a folder."""

    def call(target: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if str(path).startswith(folder):
            fail()
        return original(target, *arguments, **options)

    return call


@pytest.mark.parametrize("call", ["abort_uploads", "find_files"])
def test_housekeeping_that_fails_keeps_no_run_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("cannot list: access denied")

    monkeypatch.setattr(storage, call, fail)
    with pytest.warns(UserWarning, match="could not delete leftovers of older runs: cannot list"):
        train(tmp_path, trainer={"max_steps": 1})
    assert list_steps(tmp_path) == [1]


@pytest.mark.parametrize("behind", [False, True])
def test_retention_that_fails_is_told_beside_a_save_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("cannot delete: access denied")

    monkeypatch.setattr(Catalog, "retire", fail)
    train(tmp_path, trainer={"max_steps": 2}, checkpoint={"every": 2, "async": behind})
    assert list_steps(tmp_path) == [2]
    assert "but: cannot delete: access denied" in capsys.readouterr().out


def test_a_save_that_was_asked_for_and_failed_is_still_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"keep": 0, "at_end": False, "save_on_error": "warn"}
    small_jobs.MORE.append(at_step(3, lambda: send(signal.SIGUSR1)))
    fail_once(monkeypatch, 4)
    train(tmp_path, checkpoint=kept)
    assert list_steps(tmp_path) == [5]


def test_a_save_that_was_asked_for_is_not_forgotten_where_the_next_one_settles_it_and_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of step 3 was asked for, and is under way until that of step 4, which is due, settles it."""
    monkeypatch.setattr(occasions, "_LONGEST_PAUSE", 0.0)
    settling, settle, write = threading.Event(), Checkpointer.settle, storage.open_write

    def open_write(url: str) -> Any:
        if "step-00000003" in url:
            settling.wait(60)
        if "step-00000003" in url or "step-00000004" in url:
            raise StorageError(f"cannot write {url}: no space")
        return write(url)

    def settle_now(self: Checkpointer) -> Any:
        settling.set()
        return settle(self)

    def wait_for_the_writer(run: Any, step: int) -> None:
        behind = run.checkpointer._background
        assert step < 5 or behind is None or behind.wait(60)

    monkeypatch.setattr(storage, "open_write", open_write)
    monkeypatch.setattr(Checkpointer, "settle", settle_now)
    small_jobs.MORE.extend([at_step(2, lambda: send(signal.SIGUSR1)), wait_for_the_writer])
    train(tmp_path, checkpoint={"keep": 0, "every": 4, "save_on_error": "warn", "async": True})
    steps = list_steps(tmp_path)
    assert len(steps) == 2, steps
    assert 4 < steps[0] < steps[1] == 8
