"""One save, and what happens at each of its storage operations: the process is killed, or stopped while a newer run
goes on, or the operation fails. In each case the next run finds the checkpoint before or the new one, whole."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import get_forks
from storage_points import (
    Fork,
    Points,
    age,
    fail,
    go_on,
    kill,
    make_marked_engine,
    open_root,
    require_clean,
    save_step,
    stop,
)

from dsjob.engine.engine import Engine

MOST = 400  # more than there are operations


@pytest.fixture
def root() -> Iterator[str]:
    """A folder on a file system that needs not wait for a disk, where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield os.path.realpath(folder)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a new process, which may fork itself as it likes; what it returns."""
    context = get_forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        found, error = ours.recv()
    finally:
        process.join(10)
        process.kill()
    assert not error, error
    return found


def _call(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((function(*arguments), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def save_at_points(
    root: str, step: int, engine: Engine, at: int, act: Callable[[], None], times: int = 1, behind: bool = False
) -> bool:
    """A run that begins and saves `step`, struck at an operation; whether there was one of that number."""
    points = Points(root, at, act, times=times)
    save_step(open_root(root), engine, step, behind=behind)
    return points.count >= at


class Rolling:
    """A root whose newest checkpoint is that of `step`, and an engine; each case leaves it so."""

    def __init__(self, root: str) -> None:
        self.root, self.engine, self.step, self.outcomes = root, make_marked_engine(), 1, Counter[str]()
        Fork(lambda: save_step(open_root(root), self.engine, 1)).get()

    def check(self, kind: str, case: object) -> None:
        """The next run goes on from the checkpoint before or the new one, the latter where it was acknowledged."""
        age(self.root, 2 * 86400)
        found, saved = Fork(lambda: go_on(self.root, self.engine)).get()
        assert found == self.step + 1 if kind == "returned" else found in (self.step, self.step + 1), (case, found)
        require_clean(self.root, saved)
        self.outcomes[f"{kind}, {'new' if found > self.step else 'old'}"] += 1
        self.step = saved


def kill_everywhere(root: str, every: int, behind: bool) -> Counter[str]:
    """Kills a save at every operation, or every n-th; how often the new checkpoint was there afterwards."""
    rolling = Rolling(root)
    for at in range(1, MOST, every):
        kind, _ = Fork(lambda: save_at_points(root, rolling.step + 1, rolling.engine, at, kill, 1, behind)).wait()  # noqa: B023
        rolling.check(kind, at)
        if kind == "returned":
            return rolling.outcomes
    raise AssertionError("there are more operations than points")


@pytest.mark.full("1-waited for", "1-in the background", "9-waited for")
@pytest.mark.parametrize("behind", [False, True], ids=["waited for", "in the background"])
@pytest.mark.parametrize("every", [9, 1])
def test_a_save_that_is_killed_at_any_operation_is_there_or_not(root: str, every: int, behind: bool) -> None:
    outcomes = in_a_process(kill_everywhere, root, every, behind)
    print(f"killed at {outcomes['killed, old'] + outcomes['killed, new']} operations: {dict(outcomes)}")  # noqa: T201
    assert outcomes["killed, old"] > 30 / every
    assert outcomes["killed, new"] > 5 / every


def fail_everywhere(root: str, numbers: list[int], every: int, times: int) -> Counter[str]:
    """Lets every operation fail, or every n-th; from then on all of them where `times` is large."""
    rolling = Rolling(root)
    for number in numbers:
        for at in range(1, MOST, every):
            act = fail(number)
            kind, value = Fork(lambda: save_at_points(root, rolling.step + 1, rolling.engine, at, act, times)).wait()  # noqa: B023
            rolling.check(kind, (errno.errorcode[number], at, value))
            if kind == "returned" and not value:
                break
        else:
            raise AssertionError("there are more operations than points")
    return rolling.outcomes


FAILURES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]


@pytest.mark.parametrize(
    ("numbers", "every", "times"),
    [
        ([errno.EIO], 11, 1),
        ([errno.ENOSPC], 17, MOST),
        pytest.param(FAILURES, 1, 1, marks=pytest.mark.full),
        pytest.param(FAILURES, 1, MOST, marks=pytest.mark.full),
    ],
    ids=["once", "from then on", "all, once", "all, from then on"],
)
def test_a_save_whose_operations_fail_is_told_in_words(root: str, numbers: list[int], every: int, times: int) -> None:
    outcomes = in_a_process(fail_everywhere, root, numbers, every, times)
    print(f"{outcomes.total()} operations that failed: {dict(outcomes)}")  # noqa: T201
    assert outcomes["refused, old"] > 3


def stop_everywhere(root: str, every: int, behind: bool) -> Counter[str]:
    """Stops a save at every operation, or every n-th, lets a newer run go on, and then the older one; how that ended,
    and which checkpoint the newer one had found."""
    rolling, fenced = Rolling(root), Counter[str]()

    def save(at: int) -> bool:
        checkpointer = open_root(root)
        points = Points(root, at, stop)
        save_step(checkpointer, rolling.engine, rolling.step + 1, behind=behind)
        return points.count >= at

    for at in range(1, MOST, every):
        older = Fork(lambda: save(at))  # noqa: B023
        if not older.wait_until_stopped():
            assert older.get() is False
            return fenced
        found, saved = Fork(lambda: go_on(root, rolling.engine)).get()
        os.kill(older.pid, signal.SIGCONT)
        kind, value = older.wait()
        assert found == rolling.step + 1 if kind == "returned" else "FencedError" in value, (at, found, value)
        fenced[f"{kind}, {'new' if found > rolling.step else 'old'}"] += 1
        rolling.step = saved - 1
        rolling.check("returned", (at, value))
    raise AssertionError("there are more operations than points")


@pytest.mark.parametrize(
    ("every", "behind"),
    [
        (9, False),
        pytest.param(1, False, marks=pytest.mark.full),
        pytest.param(1, True, marks=pytest.mark.full),
    ],
)
def test_a_save_that_is_stopped_at_any_operation_loses_to_the_newer_run(root: str, every: int, behind: bool) -> None:
    outcomes = in_a_process(stop_everywhere, root, every, behind)
    print(f"stopped: {dict(outcomes)}")  # noqa: T201
    assert outcomes["refused, old"] > 3
