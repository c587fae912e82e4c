"""Attempts: one number each, and of two runs the newer one alone may commit. On disk and on S3."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dsjob import storage
from dsjob.checkpoint.root.attempts import Attempt, claim, claim_once
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.garbage import clear
from dsjob.checkpoint.root.retention import Retention
from dsjob.errors import CheckpointError, FencedError, StorageError

spawn = multiprocessing.get_context("spawn")


@pytest.fixture(params=["path", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "path" else str(request.getfixturevalue("s3"))


def commit(url: str, attempt: Attempt, step: int, tag: str = "") -> str:
    tag = tag or f"step-{step:08d}"
    folder = attempt.name_folder(tag)
    storage.make_folder(storage.join(url, folder))
    Catalog(url).commit(folder, {"tag": tag, "step": step}, attempt, latest=True)
    return folder


@pytest.mark.full("s3")
def test_runs_that_begin_at_once_get_numbers_of_their_own(root: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = [attempt.number for attempt in pool.map(lambda _: claim(root), range(8))]
    assert sorted(numbers) == list(range(1, 9))


def test_an_older_run_may_not_commit(root: str) -> None:
    old = claim(root)
    commit(root, old, 1)
    new = claim(root)
    with pytest.raises(FencedError, match=r"a newer run of this job has started in .* \(attempt 2\)"):
        commit(root, old, 2)
    commit(root, new, 2)
    assert [(r["step"], r["attempt"]) for r in Catalog(root).records()] == [(1, 1), (2, 2)]


def test_folders_of_before_there_were_attempts_are_counted(tmp_path: Path) -> None:
    storage.make_folder(str(tmp_path / "step-00000005-a0007"))
    assert claim(str(tmp_path)).number == 8


def test_a_folder_is_named_once_and_found_by_its_name(tmp_path: Path) -> None:
    attempt = claim(str(tmp_path))
    assert [attempt.name_folder(tag) for tag in ("x", "y", "x")] == ["x-a0001", "y-a0001", "x-a0001.2"]
    folder = commit(str(tmp_path), attempt, 3, "x")
    assert folder == "x-a0001.3"
    assert Catalog(str(tmp_path)).find(folder)["tag"] == "x"


def test_a_program_has_one_number_and_fences_nobody(tmp_path: Path) -> None:
    job = claim(f"{tmp_path}/job")
    assert claim_once(f"{tmp_path}/job") is job
    program = claim_once(f"{tmp_path}/own")
    assert claim_once(f"{tmp_path}/own") is program
    claim(f"{tmp_path}/own")
    program.require_newest()


def fill(url: str, attempt: Attempt, tag: str) -> str:
    """A folder that is being written."""
    folder = attempt.name_folder(tag)
    storage.make_folder(f"{url}/{folder}/done")
    storage.write_bytes(f"{url}/{folder}/state.json", b"{}")
    return folder


def test_programs_that_save_into_a_jobs_root_and_the_job_leave_each_other_alone(tmp_path: Path) -> None:
    url = str(tmp_path)
    job = claim(url)
    program = claim(url, fences=False)
    commit(url, job, 1)
    left, filled = fill(url, job, "left"), fill(url, program, "mine")
    again = claim(url)
    assert clear(url, again) == ()
    assert not (tmp_path / left).exists()
    commit(url, program, 7, "mine-2")
    Catalog(url).retire(Retention(0), again)
    assert {record["tag"] for record in Catalog(url).records()} == {"step-00000001", "mine-2"}
    assert (tmp_path / filled).exists()
    with pytest.raises(FencedError, match="attempt 3"):
        commit(url, job, 2)


def test_attempts_of_before_it_was_noted_fence(tmp_path: Path) -> None:
    old = claim(str(tmp_path))
    storage.write_bytes(f"{tmp_path}/attempts/a0002.json", b'{"attempt": 2}')
    with pytest.raises(FencedError):
        old.require_newest()


@pytest.mark.parametrize(
    "act",
    [
        lambda catalog, attempt: catalog.set_aside(0, attempt),
        lambda catalog, attempt: catalog.set_aside_damaged(["step-00000002"], attempt),
        lambda catalog, attempt: catalog.retire(Retention(1), attempt),
    ],
)
def test_a_fenced_run_leaves_the_checkpoints_of_the_newer_one(tmp_path: Path, act: Any) -> None:
    url = str(tmp_path)
    old, new = claim(url), claim(url)
    commit(url, new, 1)
    commit(url, new, 2)
    with pytest.raises(FencedError):
        act(Catalog(url), old)
    assert [record["step"] for record in Catalog(url).records()] == [1, 2]


def test_what_a_newer_program_has_committed_is_not_set_aside(tmp_path: Path) -> None:
    url = str(tmp_path)
    job = claim(url)
    commit(url, job, 3)
    commit(url, claim(url, fences=False), 4)
    Catalog(url).set_aside(1, job)
    Catalog(url).set_aside_damaged(["step-00000004"], job)
    assert [record["step"] for record in Catalog(url).records()] == [4]


def test_what_fails_after_the_record_is_told_and_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = storage.write_bytes

    def write(url: str, data: bytes) -> None:
        if url.endswith(("latest", "zero_to_fp32.py")):
            raise StorageError(f"cannot write {url}")
        original(url, data)

    monkeypatch.setattr(storage, "write_bytes", write)
    url, attempt = str(tmp_path), claim(str(tmp_path))
    folder = attempt.name_folder("x")
    storage.make_folder(f"{url}/{folder}")
    notes = Catalog(url).commit(folder, {"tag": "x", "step": 1}, attempt, latest=True)
    assert notes == (f"cannot write {url}/latest", f"cannot write {url}/zero_to_fp32.py")
    assert Catalog(url).find("x")["dir"] == folder


def test_a_store_that_knows_no_creation_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(url: str, data: bytes, *, exclusive: bool = True) -> None:
        with storage._renamed("create", "store://x"):
            raise NotImplementedError("mode create")

    monkeypatch.setattr(storage, "create_bytes", create)
    with pytest.raises(CheckpointError, match="does not support exclusive file creation") as caught:
        claim(str(tmp_path))
    assert "checkpoint.single_writer=true" in caught.value.hint


class Paused:
    """A commit of an older attempt that stops right before or right after it creates its record, and goes on later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: str, meanwhile: Any) -> None:
        original = storage.create_bytes

        def create(url: str, data: bytes, *, exclusive: bool = True) -> None:
            if "/commits/" in url and when == "before":
                monkeypatch.undo()
                meanwhile()
            original(url, data, exclusive=exclusive)
            if "/commits/" in url and when == "after":
                monkeypatch.undo()
                meanwhile()

        monkeypatch.setattr(storage, "create_bytes", create)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_a_newer_run_may_not_have_seen_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    url, newer = str(tmp_path), []
    old = claim(url)
    Paused(monkeypatch, when, lambda: newer.append(claim(url)))
    with pytest.raises(FencedError):
        commit(url, old, 5)
    new = newer[0]
    if when == "after":  # the newer run has found it there, and goes on from it
        with pytest.raises(CheckpointError, match="already has a checkpoint step-00000005"):
            commit(url, new, 5)
        return
    commit(url, new, 4)
    Catalog(url).retire(Retention(0), new)
    assert [record["attempt"] for record in Catalog(url).records()] == [2]
    commit(url, new, 5)
    assert Catalog(url).find(None)["attempt"] == 2


def test_a_fenced_run_takes_back_its_record_of_a_folder_that_was_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be the newest checkpoint, and a damaged one, to the next run."""
    url = str(tmp_path)
    old = claim(url)
    commit(url, old, 4)
    Paused(monkeypatch, "before", lambda: clear(url, claim(url)))
    with pytest.raises(FencedError):
        commit(url, old, 5)
    assert [record["step"] for record in Catalog(url).records()] == [4]


def test_the_record_of_a_fenced_run_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, newer = str(tmp_path), []
    old = claim(url)
    Paused(monkeypatch, "before", lambda: newer.append(claim(url)))
    with pytest.raises(FencedError):
        commit(url, old, 5)
    commit(url, newer[0], 5)
    assert Catalog(url).find(None)["attempt"] == 2
    assert storage.list_names(f"{url}/superseded") == ["step-00000005-a0001.json"]


def race(url: str, start: Any, outcomes: Any) -> None:
    """Two of these begin at once; each claims and commits the same tag."""
    for number in itertools.count():
        start.wait()
        place = f"{url}/{number}"
        try:
            attempt = claim(place)
            commit(place, attempt, 1)
            outcomes.put((number, attempt.number, "won"))
        except CheckpointError as error:
            outcomes.put((number, 0, type(error).__name__))
        start.wait()


def run_races(url: str, count: int) -> None:
    start, outcomes = spawn.Barrier(3), spawn.Queue()
    racers = [spawn.Process(target=race, args=(url, start, outcomes), daemon=True) for _ in range(2)]
    for racer in racers:
        racer.start()
    try:
        for number in range(count):
            start.wait(60)
            found = [outcomes.get(timeout=60) for _ in range(2)]
            assert [n for n, *_ in found] == [number] * 2
            won = [attempt for _, attempt, outcome in found if outcome == "won"]
            assert {outcome for *_, outcome in found} <= {"won", "FencedError", "CheckpointError"}
            # An older run whose commit the newer one has found when it began is not told that it has won.
            assert len(won) == 1 or (not won and any(outcome == "FencedError" for *_, outcome in found)), found
            assert [record["attempt"] for record in Catalog(f"{url}/{number}").records()] == (won or [1])
            start.wait(60)
    finally:
        for racer in racers:
            racer.kill()
            racer.join()


@pytest.mark.full("s3")
def test_of_two_runs_that_race_for_a_tag_one_wins_and_the_other_says_so(root: str) -> None:
    run_races(root, 8)


@pytest.mark.full
def test_of_two_runs_that_race_for_a_tag_one_wins_a_hundred_times(root: str) -> None:
    run_races(root, 100)


def wait_and_commit(url: str, ready: Any) -> None:
    attempt = claim(url)
    commit(url, attempt, 1)
    ready.put(os.getpid())
    for step in itertools.count(2):
        try:
            time.sleep(0.05)
            commit(url, attempt, step)
        except FencedError as error:
            ready.put(str(error.message))
            return


@pytest.mark.slow
def test_a_stopped_run_that_wakes_up_finds_itself_fenced(root: str) -> None:
    ready = spawn.Queue()
    old = spawn.Process(target=wait_and_commit, args=(root, ready), daemon=True)
    old.start()
    os.kill(ready.get(timeout=60), signal.SIGSTOP)
    new = claim(root)
    before = Catalog(root).records()
    commit(root, new, 1000)
    os.kill(old.pid or 0, signal.SIGCONT)
    assert "a newer run of this job has started in" in ready.get(timeout=60)
    old.join()
    Catalog(root).retire(Retention(0), new)
    assert Catalog(root).records()[:-1] == before
    assert Catalog(root).find(None)["attempt"] == 2
