"""The storage operations of a save, one by one: at each of them a process is killed, stopped, or told an error.

`Points` counts what a process does below a folder, by the audit events of the interpreter and at each write and fsync.
`run_fork` runs something in a fork, whose end is told; a fork has the engine of the test, and no thread of it.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import make_engine, train_engine

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.root.retention import Retention
from dsjob.engine.engine import Engine
from dsjob.errors import DsjobError
from dsjob.ranks.mesh import join_world

EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link")


class Points:
    """From now on in this process, `act` is called right before the storage operation number `at`, counted from 1.

    `act` may raise OSError in the operation's place. Of a write, half of it is done before.
    """

    def __init__(self, folder: str, at: int, act: Callable[[], None], *, times: int = 1) -> None:
        self.count, self.folder, self.at, self.act, self.times = 0, folder, at, act, times
        sys.addaudithook(self._hear)
        self._fsync, os.fsync = os.fsync, self._watch_fsync
        storage.open = lambda handle, mode: io.BufferedWriter(_Watched(self, handle))  # type: ignore[attr-defined]

    def reach(self, before: Callable[[], object] = lambda: None) -> None:
        """One operation is about to be done."""
        self.count += 1
        if self.at <= self.count < self.at + self.times:
            before()
            self.act()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        path = arguments[0]
        relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # of a folder that is being deleted
        if relative or (isinstance(path, str) and path.startswith(self.folder)):
            self.reach()

    def _watch_fsync(self, handle: int) -> None:
        self.reach()
        self._fsync(handle)


class _Watched(io.FileIO):
    def __init__(self, points: Points, handle: int) -> None:
        super().__init__(handle, "wb")
        self._points = points

    def write(self, data: Any) -> int:
        half = memoryview(data)[: len(data) // 2]
        self._points.reach(lambda: super(_Watched, self).write(half))
        return super().write(data) or 0


def kill() -> None:
    """Ends this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stops this process until SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(number: int) -> Callable[[], None]:
    """What a system call that fails with this errno does."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


class Fork:
    """A fork of this process that calls a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._read)
            try:
                found: Any = ("returned", function())
            except DsjobError as error:
                found = ("refused", f"{type(error).__name__}: {error.message}")
            except BaseException:
                found = ("raised", traceback.format_exc())
            with open(write, "wb") as pipe:
                pickle.dump(found, pipe)
            os._exit(0)
        os.close(write)

    def wait(self) -> tuple[str, Any]:
        """`returned` and a value, `refused` and an error of the project as text, or `killed` and None."""
        with open(self._read, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return "killed", None
        kind, value = pickle.loads(data)
        assert kind != "raised", value
        return kind, value

    def get(self) -> Any:
        """What the function returned."""
        kind, value = self.wait()
        assert kind == "returned", value
        return value

    def wait_until_stopped(self) -> bool:
        """Whether it has stopped itself; else it has ended."""
        info = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return info is not None and info.si_code == os.CLD_STOPPED


def make_marked_engine() -> Engine:
    """An engine with an optimizer's state, whose values are then a matter of `mark`."""
    engine = make_engine(0)
    train_engine(engine, 0, 1)
    return engine


def mark(engine: Engine, step: int) -> None:
    """Gives every tensor the values that belong to a step."""
    with torch.no_grad():
        for number, tensor in enumerate(_tensors(engine)):
            tensor.fill_(100 * step + number)
    engine.restore_counters({**engine.counters(), "global_steps": step})


def require_marks(engine: Engine, step: int) -> None:
    """Every tensor has the values of this step, and the counters too."""
    assert engine.global_steps == step
    for number, tensor in enumerate(_tensors(engine)):
        assert torch.equal(tensor, torch.full_like(tensor, 100 * step + number)), (step, number, tensor)


def _tensors(engine: Engine) -> list[torch.Tensor]:
    state = engine.state()
    return [tensor for _, tensor in sorted({**state.model_tensors(), **state.optimizer_tensors()}.items())]


def open_root(url: str) -> Checkpointer:
    """A new run that keeps one checkpoint."""
    checkpointer = Checkpointer(url, world=join_world(device="cpu"), retention=Retention(1), timeout=60)
    checkpointer.open()
    return checkpointer


def save_step(checkpointer: Checkpointer, engine: Engine, step: int, *, behind: bool = False) -> tuple[str, ...]:
    """Saves what belongs to a step; the notes."""
    mark(engine, step)
    if behind:
        checkpointer.save_behind(engine, tag=f"step-{step:08d}")
        saved = checkpointer.settle()
        assert saved
        return saved.notes
    return checkpointer.save(engine, tag=f"step-{step:08d}").notes


def load_newest(checkpointer: Checkpointer, engine: Engine) -> int:
    """Loads the newest checkpoint, which is of one step and no other; that step."""
    mark(engine, 0)
    loaded = checkpointer.load(engine)
    require_marks(engine, loaded.step)
    return loaded.step


def go_on(url: str, engine: Engine) -> tuple[int, int]:
    """What the next run does: it loads and saves. The step that it has found, and the one that it has saved."""
    checkpointer = open_root(url)
    found = load_newest(checkpointer, engine)
    notes = save_step(checkpointer, engine, found + 1)
    assert not notes, notes
    return found, found + 1


def require_clean(url: str, step: int) -> None:
    """The root holds one checkpoint and nothing that is of no use."""
    names = set(storage.list_names(url)) - {"superseded"}
    folders = {name for name in names if name.startswith("step-")}
    assert names - folders == {"attempts", "commits", "latest", "zero_to_fp32.py"}
    assert storage.list_names(f"{url}/commits") == [f"step-{step:08d}.json"]
    assert [name[:13] for name in folders] == [f"step-{step:08d}"]
    assert not [name for name in storage.find_files(url) if name.endswith(".tmp")]


def age(root: str, seconds: float) -> None:
    """Lets everything have been written so long ago."""
    for path in Path(root).rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))
