"""Saving to and loading from a store that answers late, wrongly, half or not at all: what is loaded was saved, or there
is an error in words, and the checkpoint before stays whole. Through a proxy before a real S3 protocol server."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from forks import begin_anew, get_forks
from s3 import shorten_waits
from s3_faults import KINDS, FaultyStore, faulty_store
from storage_points import go_on, load_newest, make_marked_engine, open_root, require_clean, save_step

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.offline.convert import convert
from dsjob.checkpoint.offline.transfer import copy
from dsjob.checkpoint.offline.verify import verify
from dsjob.engine.engine import Engine
from dsjob.errors import CheckpointError, CorruptCheckpointError, FencedError, StorageError
from dsjob.ranks.mesh import join_world

TRANSIENT = ["503", "drop", "hang", "lost"]  # what a store may do to any request, and a client has to bear
MOST = 400
EVERY = range(MOST)  # more than there are requests
SOME = [25, 27]  # of a save's: that which writes the manifest, and that which creates the commit record
FOREVER = 1_000_000


@pytest.fixture
def faulty(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    with faulty_store(s3_server, monkeypatch) as store:
        yield store


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_marked_engine()


def load(url: str, engine: Engine) -> int:
    return load_newest(Checkpointer(url, world=join_world(device="cpu")), engine)


# ---- reading


def export(url: str, engine: Engine, folder: Path) -> None:
    convert(url, str(folder / "weights"), to="fp32")


def read_weights(folder: Path) -> bytes:
    return (folder / "weights" / "model.safetensors").read_bytes()


READERS: dict[str, Callable[[str, Engine, Path], Any]] = {
    "load": lambda url, engine, folder: load(url, engine),
    "convert": export,
    "copy": lambda url, engine, folder: copy(url, str(folder / "copy")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("/r00000-of-", "short"),
        *((part, "flip") for part in ("/r00000-of-", "/commits/step-")),
        *(pytest.param(part, "flip", marks=pytest.mark.full) for part in ("manifest.json", "state.json")),
        *(
            pytest.param(part, "short", marks=pytest.mark.full)
            for part in ("manifest.json", "/commits/step-", "state.json")
        ),
    ],
)
@pytest.mark.full("/commits/step--flip", "/r00000-of--short")
def test_what_arrives_short_or_changed_is_never_taken_for_what_was_saved(
    s3: str, faulty: FaultyStore, engine: Engine, tmp_path: Path, part: str, kind: str
) -> None:
    save_step(open_root(s3), engine, 1)
    export(s3, engine, tmp_path / "right")
    for name, read in READERS.items():
        faulty.fail(kind, "GET", part=part, times=FOREVER)
        try:
            read(s3, engine, tmp_path / name)
        except CorruptCheckpointError:
            assert not list((tmp_path / name).rglob("model.safetensors"))
            assert not list((tmp_path / name).rglob("commits/*"))
        else:  # it looks at weights alone
            assert name == "convert"
            assert read_weights(tmp_path / name) == read_weights(tmp_path / "right")
        faulty.faults.clear()
    faulty.fail(kind, "GET", part=part, times=FOREVER)
    try:
        assert any(one.damages for one in verify(s3))
    except CorruptCheckpointError:
        assert "commits" in part
    faulty.faults.clear()
    assert load(s3, engine) == 1


def read_with_faults(
    url: str, faulty: FaultyStore, engine: Engine, kinds: list[str], skips: Sequence[int]
) -> Counter[str]:
    """Loads with a fault of each kind at each of these requests; what came of it."""
    outcomes = Counter[str]()
    for kind in kinds:
        for skip in skips:
            fault = faulty.fail(kind, skip=skip)
            try:
                step = load(url, engine)
                listing = faulty.seen[-1][1]
                assert step == 2 or (kind == "flip" and "list-type" in listing), (kind, skip)
                outcomes[f"{kind}: loaded"] += 1
            except (CheckpointError, StorageError):
                assert kind not in TRANSIENT, (kind, skip)
                outcomes[f"{kind}: refused"] += 1
            faulty.faults.clear()
            if fault.times:
                break
        assert fault.times or skips is not EVERY, "there are more requests than faults"
    assert load(url, engine) == 2
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kinds", "skips"),
    [(["503", "cut", "short", "flip"], [5, 15]), pytest.param(KINDS, EVERY, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_a_fault_of_any_request_of_a_load(
    s3: str, faulty: FaultyStore, engine: Engine, kinds: list[str], skips: Sequence[int]
) -> None:
    world = join_world(device="cpu")
    checkpointer = Checkpointer(s3, world=world)
    checkpointer.open()
    for step in (1, 2):
        save_step(checkpointer, engine, step)
    outcomes = read_with_faults(s3, faulty, engine, kinds, skips)
    print(f"{outcomes.total()} loads: {dict(outcomes)}")  # noqa: T201
    assert outcomes["flip: refused"]
    assert outcomes["short: refused"]


# ---- writing


class Rolling:
    """A root whose newest checkpoint is that of `step`; each case leaves it so."""

    def __init__(self, url: str, engine: Engine) -> None:
        self.url, self.engine, self.step, self.outcomes = url, engine, 1, Counter[str]()
        save_step(open_root(url), engine, 1)

    def check(self, saved: bool, what: str, case: object) -> None:
        """The next run goes on from the checkpoint before or the new one, the latter where it was acknowledged."""
        found, step = go_on(self.url, self.engine)
        assert found == self.step + 1 if saved else found in (self.step, self.step + 1), (case, found)
        require_clean(self.url, step)
        self.outcomes[f"{what}, {'new' if found > self.step else 'old'}"] += 1
        self.step = step


def save_with_faults(
    url: str, faulty: FaultyStore, engine: Engine, faults: dict[str, Sequence[int]], times: int
) -> Counter[str]:
    """Saves with a fault of each kind at each of these requests, or from it on; what came of it."""
    rolling = Rolling(url, engine)
    for kind, skips in faults.items():
        for skip in skips:
            fault, saved = faulty.fail(kind, skip=skip, times=times), True
            try:
                save_step(open_root(url), engine, rolling.step + 1)
            except (CheckpointError, StorageError):
                saved = False
            faulty.faults.clear()
            assert saved or times > 1 or kind not in TRANSIENT, (kind, skip)
            rolling.check(saved, f"{kind}: {'saved' if saved else 'refused'}", (kind, skip))
            if fault.times == times:
                break
        assert (fault.times == times) == isinstance(skips, range), "there are more requests than faults, or fewer"
    return rolling.outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("faults", "times"),
    [
        pytest.param({"lost": SOME[1:], "flip": SOME[:1]}, 1, id="some once"),
        pytest.param({"503": SOME[1:]}, FOREVER, id="busy for good"),
        *(pytest.param({kind: EVERY}, 1, marks=pytest.mark.full, id=f"{kind} once") for kind in KINDS),
        *(pytest.param({kind: EVERY[::4]}, FOREVER, marks=pytest.mark.full, id=f"{kind} for good") for kind in KINDS),
    ],
)
@pytest.mark.filterwarnings("ignore:could not delete leftovers of older runs")
@pytest.mark.full("busy for good")
def test_a_fault_of_any_request_of_a_save(
    s3: str,
    faulty: FaultyStore,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, Sequence[int]],
    times: int,
) -> None:
    if times > 1:
        monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)  # they would be borne with for long
    outcomes = save_with_faults(s3, faulty, engine, faults, times)
    print(f"{outcomes.total()} saves: {dict(outcomes)}")  # noqa: T201


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stays"), [("403", False), ("503", True), ("drop", True)])
@pytest.mark.full("drop-True")
def test_the_folder_of_a_save_goes_where_its_record_was_refused_for_good(
    s3: str, faulty: FaultyStore, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str, stays: bool
) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)  # they would be borne with for long
    checkpointer = open_root(s3)
    save_step(checkpointer, engine, 1)
    fault = faulty.fail(kind, "PUT", part="/commits/step-00000002", times=FOREVER)
    with pytest.raises(StorageError, match="step-00000002"):
        save_step(checkpointer, engine, 2)
    assert fault.times < FOREVER
    faulty.faults.clear()
    names = storage.list_names(s3)
    assert [name[:13] for name in names if name.startswith("step-")] == ["step-00000001"] + ["step-00000002"] * stays
    assert load(s3, engine) == 1


# ---- killed, and stopped


def save_and_end(url: str, step: int, environment: dict[str, str], opened: Any, begin: Any) -> None:
    """Saves a step as a run of its own, and ends with 0, or with 3 where it is fenced."""
    begin_anew(environment)
    torch.set_num_threads(1)
    shorten_waits(pytest.MonkeyPatch())
    engine, checkpointer = make_marked_engine(), None
    if opened is not None:
        checkpointer = open_root(url)
        opened.set()
    begin.wait(60)
    try:
        save_step(checkpointer or open_root(url), engine, step)
    except FencedError:
        os._exit(3)
    os._exit(0)


class Strike:
    """A process that saves, and a fault that its request number `skip` brings it."""

    def __init__(self, faulty: FaultyStore, url: str, step: int, kind: str, skip: int, *, opens_first: bool) -> None:
        context = get_forks()
        self.begin, opened = context.Event(), context.Event() if opens_first else None  # kept: the process opens them
        self.process = context.Process(target=save_and_end, args=(url, step, dict(os.environ), opened, self.begin))
        self.process.start()
        assert self.process.pid
        assert opened is None or opened.wait(60)
        faulty.victim = self.process.pid
        faulty.waiting.clear()
        faulty.go_on.clear()
        self.fault = faulty.fail(kind, skip=skip)
        self.begin.set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("skips", [SOME[1:], pytest.param(EVERY, marks=pytest.mark.full)], ids=["one", "every"])
@pytest.mark.parametrize("kind", ["kill", pytest.param("killed", marks=pytest.mark.full)])
def test_a_save_that_is_killed_at_any_request_is_there_or_not(
    s3: str, faulty: FaultyStore, engine: Engine, kind: str, skips: Sequence[int]
) -> None:
    rolling = Rolling(s3, engine)
    for skip in skips:
        strike = Strike(faulty, s3, rolling.step + 1, kind, skip, opens_first=False)
        strike.process.join(60)
        faulty.faults.clear()
        code = strike.process.exitcode
        assert code == (0 if strike.fault.times else -9)
        rolling.check(code == 0, "killed" if code else "ended", (kind, skip))
        if not code:
            break
    print(f"killed at some requests: {dict(rolling.outcomes)}")  # noqa: T201
    assert rolling.outcomes[f"killed, {'old' if kind == 'kill' else 'new'}"]
    assert skips is not EVERY or rolling.outcomes["killed, new"] > 1
    assert skips is not EVERY or rolling.outcomes["ended, new"] == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "skips"),
    [("stop", [7]), *(pytest.param(kind, EVERY, marks=pytest.mark.full) for kind in ("stop", "stopped"))],
    ids=["stop at one", "stop at every", "stopped at every"],
)
@pytest.mark.full
def test_a_save_that_is_stopped_at_any_request_loses_to_the_newer_run(
    s3: str, faulty: FaultyStore, engine: Engine, kind: str, skips: Sequence[int]
) -> None:
    """`stop`: the store carries its request out only when the newer run is done. The root is open already, which takes
    20 requests, so the seventh creates the commit record."""
    rolling = Rolling(s3, engine)
    for skip in skips:
        strike = Strike(faulty, s3, rolling.step + 1, kind, skip, opens_first=True)
        while not faulty.waiting.wait(0.05) and strike.process.is_alive():
            pass
        faulty.faults.clear()
        if not faulty.waiting.is_set():
            assert strike.process.exitcode == 0
            break
        found, saved = go_on(s3, engine)
        os.kill(faulty.victim, signal.SIGCONT)
        faulty.go_on.set()
        strike.process.join(60)
        code = strike.process.exitcode
        assert code == 3 or (code == 0 and found == rolling.step + 1), (kind, skip, code, found)
        rolling.outcomes["fenced" if code else "acknowledged before"] += 1
        rolling.step = saved - 1
        rolling.check(True, "newer run", (kind, skip))
    print(f"stopped: {dict(rolling.outcomes)}")  # noqa: T201
    assert rolling.outcomes["fenced"]
