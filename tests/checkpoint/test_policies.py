"""When checkpoints are made, which stay, what failures do, and how a run finds its way back."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from small_jobs import at_step, list_steps, make_document, read_digests, run, send

from dsjob import occasions, storage
from dsjob.checkpoint import background
from dsjob.checkpoint.catalog import Catalog
from dsjob.checkpoint.prepared import PreparedSave
from dsjob.checkpoint.shards import write_record
from dsjob.checkpoint.state import TrainingState
from dsjob.errors import CheckpointError, CorruptCheckpointError, FencedError, Interrupted, Preempted, StorageError


@pytest.fixture(autouse=True)
def hooks() -> Iterator[list[Any]]:
    yield small_jobs.MORE
    small_jobs.MORE.clear()


def train(folder: Path, **sections: Any) -> dict[int, float]:
    return run(make_document(folder, **sections))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, checkpoint={"every": 1, "keep": 0})
    return folder


# ---- when


@pytest.mark.parametrize(
    ("checkpoint", "steps"),
    [
        ({"every": 3}, [3, 6, 8]),
        ({"every": 3, "at_end": False}, [3, 6]),
        ({"every_epochs": 1}, [5, 8]),
        ({"every_epochs": 0.4}, [2, 4, 6, 8]),
        ({"every_minutes": 1e-6}, list(range(1, 9))),
        ({"every_minutes": 60}, [8]),
        ({"every": 1, "keep": 1, "keep_every": 3}, [3, 6, 8]),
    ],
    ids=str,
)
def test_checkpoints_are_made_when_they_are_due(tmp_path: Path, checkpoint: dict[str, Any], steps: list[int]) -> None:
    train(tmp_path, checkpoint={"keep": 0, **checkpoint})
    assert list_steps(tmp_path) == steps


def test_the_best_stay_and_are_saved_when_they_are_found(tmp_path: Path) -> None:
    sections = {
        "data": {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 16}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
        "scheduler": None,
    }
    best = {"mode": "max", "keep": 2}  # the loss falls: the first two
    train(tmp_path, trainer={"eval_every": 2, "max_steps": 8}, checkpoint={"keep": 1, "best": best}, **sections)
    losses = [json.loads(line).get("eval/loss") for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [loss for loss in losses if loss is not None]
    assert sorted(found, reverse=True) == found, "the test needs a loss that falls"
    assert list_steps(tmp_path) == [2, 4, 8]


def test_usr1_and_a_touched_file_save_and_go_on(tmp_path: Path, hooks: list[Any]) -> None:
    hooks += [at_step(2, lambda: send(signal.SIGUSR1)), at_step(5, (tmp_path / "save-now").touch)]
    losses = train(tmp_path, checkpoint={"keep": 0})
    assert list_steps(tmp_path) == [3, 6, 8]
    assert list(losses) == list(range(1, 9))
    assert not (tmp_path / "save-now").exists()


@pytest.mark.parametrize("behind", [False, True])
def test_sigterm_saves_and_ends_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, whole: Path, hooks: list[Any], behind: bool
) -> None:
    hooks.append(at_step(3, lambda: send(signal.SIGTERM)))
    checkpoint = {"keep": 0, "async": behind}
    with pytest.raises(Preempted, match=r"stopped by SIGTERM after step 4, which is saved: .*step-00000004") as caught:
        train(tmp_path, checkpoint=checkpoint)
    assert caught.value.exit_code == 75
    assert list_steps(tmp_path) == [4]
    hooks.clear()
    train(tmp_path, checkpoint=checkpoint)
    assert read_digests(tmp_path, 8) == read_digests(whole, 8)


def test_without_on_signal_sigterm_is_not_for_checkpoints(tmp_path: Path, hooks: list[Any]) -> None:
    def stop(*_: Any) -> None:
        raise Interrupted(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    hooks.append(at_step(3, lambda: send(signal.SIGTERM)))
    with pytest.raises(Interrupted):
        train(tmp_path, checkpoint={"on_signal": False})
    signal.signal(signal.SIGTERM, before)
    assert list_steps(tmp_path) == []


# ---- in the background


def test_saves_in_the_background_are_those_of_the_foreground(tmp_path: Path, whole: Path) -> None:
    train(tmp_path, checkpoint={"every": 1, "keep": 0, "async": True})
    assert list_steps(tmp_path) == list(range(1, 9))
    for step in range(1, 9):
        assert read_digests(tmp_path, step) == read_digests(whole, step)


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


def test_a_writer_that_dies_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(background, "write_shard", die)
    with pytest.raises(CheckpointError, match="rank 0: SystemExit: 3"):
        train(tmp_path, checkpoint={"every": 2, "async": True})


def test_a_run_that_fails_lets_its_save_end(tmp_path: Path, hooks: list[Any]) -> None:
    def fail() -> None:
        raise ValueError("mine")

    hooks.append(at_step(3, fail))
    with pytest.raises(ValueError, match="mine"):
        train(tmp_path, checkpoint={"every": 2, "async": True})
    assert list_steps(tmp_path) == [2]


def begin_save_of_two_ranks(folder: Path, commit: background.Commit) -> background.Background:
    """Rank 0's part of a save in the background."""
    name = "step-00000002-a0001"
    plan: dict[str, Any] = {"tag": "step-00000002", "parts": [], "described": {}, "roles": {}, "values": {}}
    save = PreparedSave(url=str(folder / name), folder=name, rank=0, world_size=2, manifest={}, **plan)
    return background.Background(save, commit, lambda: None, timeout=600)


def test_a_run_that_fails_does_not_wait_for_a_rank_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_PATIENCE", 0.0)
    running = begin_save_of_two_ranks(tmp_path, lambda records: (0, ()))
    running.give_up(600)
    assert not running.ended
    running.abandon()
    assert running.wait(60)
    assert "no completion record of rank 1" in str(running.error)


def test_a_run_that_fails_waits_while_what_all_ranks_have_written_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the records, and the commit, may take longer than a rank's own part."""
    monkeypatch.setattr(background, "_PATIENCE", 0.0)
    monkeypatch.setattr(background, "read_record", lambda *_: {"rank": 1, "slow": pause()})
    write_record(str(tmp_path / "step-00000002-a0001"), 1, {"rank": 1})
    running = begin_save_of_two_ranks(tmp_path, lambda records: (len(records), pause()))
    running.give_up(60)
    assert running.ended
    assert running.result[0] == 2


def pause() -> tuple[str, ...]:
    time.sleep(0.4)
    return ()


# ---- disks


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


# ---- the way back


def damage(folder: Path, step: int) -> Path:
    """Flips a bit in the shard of a checkpoint."""
    shard = next((folder / "checkpoints").glob(f"step-{step:08d}-a*/r00000*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-30] ^= 4
    shard.write_bytes(data)
    return shard


def test_a_damaged_checkpoint_stops_the_run_and_is_told_by_file_tensor_and_offset(tmp_path: Path) -> None:
    train(tmp_path, trainer={"max_steps": 4}, checkpoint={"every": 2})
    shard = damage(tmp_path, 4)
    told = rf"{shard}: the \d+ bytes at \d+, chunk \[.*\] of tensor '(model|optimizer)\..*', differ from their sha256"
    with pytest.raises(CorruptCheckpointError, match=told) as caught:
        train(tmp_path)
    assert "checkpoint.on_corrupt=previous" in caught.value.hint


@pytest.mark.parametrize("what", ["shard", "missing shard", "manifest", "record", "state", "job"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, whole: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, trainer={"max_steps": 4}, checkpoint={"every": 2})
    root = tmp_path / "checkpoints"
    if what == "shard":
        damage(tmp_path, 4)
    elif what == "missing shard":
        next(root.glob("step-00000004-a*/r00000*")).unlink()
    else:
        names = {"record": "commits/step-00000004.json"}
        file = next(root.glob(names.get(what, f"step-00000004-a*/{what}.json")))
        file.write_text(file.read_text()[:-9])
    with pytest.raises(CorruptCheckpointError):
        train(tmp_path)
    train(tmp_path, checkpoint={"every": 2, "keep": 0, "on_corrupt": "previous"})
    assert "trying the checkpoint before it" in capsys.readouterr().out
    assert list_steps(tmp_path) == [2, 4, 6, 8]
    assert read_digests(tmp_path, 8) == read_digests(whole, 8)


@pytest.mark.parametrize(
    "error", [MemoryError("full"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("x")]
)
def test_a_device_that_is_full_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    train(tmp_path, trainer={"max_steps": 4}, checkpoint={"every": 2})

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(TrainingState, "load_optimizer", fail)
        with pytest.raises((type(error), CheckpointError)) as caught:
            train(tmp_path, checkpoint={"on_corrupt": "previous"})
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert list_steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("call", ["abort_uploads", "find_files"])
def test_housekeeping_that_fails_keeps_no_run_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("cannot list: access denied")

    monkeypatch.setattr(storage, call, fail)
    with pytest.warns(UserWarning, match="not cleared away: cannot list"):
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


def wait_for_the_writer(run: Any, step: int) -> None:
    behind = run.checkpointer._background
    assert behind is None or behind.wait(60)


@pytest.mark.parametrize("behind", [False, True])
def test_a_save_that_was_asked_for_and_fails_on_is_tried_again_after_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], behind: bool
) -> None:
    monkeypatch.setattr(occasions, "_LONGEST_PAUSE", 1e9)
    kept = {"keep": 0, "at_end": False, "save_on_error": "warn", "async": behind}
    small_jobs.MORE.append(at_step(2, lambda: send(signal.SIGUSR1)))
    small_jobs.MORE.append(wait_for_the_writer)
    for step in range(1, 9):
        fail_once(monkeypatch, step)
    train(tmp_path, checkpoint=kept)
    assert list_steps(tmp_path) == []
    assert capsys.readouterr().out.count("training goes on") == 2


def test_where_all_are_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    train(tmp_path, trainer={"max_steps": 4}, checkpoint={"every": 2})
    damage(tmp_path, 2)
    damage(tmp_path, 4)
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint is whole; of the newest: .*step-00000004"):
        train(tmp_path, checkpoint={"on_corrupt": "previous"})


def test_weights_of_another_job_begin_a_run_and_are_left_to_its_own_checkpoints(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(whole / "checkpoints")
    train(tmp_path, trainer={"max_steps": 1}, checkpoint={"resume": source})
    assert f"4 tensors from {source}/step-00000008-a0001" in capsys.readouterr().out
    again = train(tmp_path, trainer={"max_steps": 2}, checkpoint={"resume": source})
    assert "warm start" not in capsys.readouterr().out
    assert list(again) == [1, 2]
    fresh = train(tmp_path / "fresh", trainer={"max_steps": 1})
    assert again[1] < fresh[1]


def test_a_warm_start_takes_what_matches_and_tells_the_rest(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = str(whole), {"_target_": "small_jobs.Net", "width": 20}
    with pytest.raises(CheckpointError, match=r"holds another model: model\.fc\.weight is \[20, 8\] in the model"):
        train(tmp_path / "a", model=model, checkpoint={"resume": source})
    train(tmp_path / "b", model=model, checkpoint={"resume": source, "strict": False})
    assert "of another shape: model.fc.weight, model.fc.bias, model.out.weight" in capsys.readouterr().out


def test_an_older_run_finds_itself_fenced_at_its_next_save(tmp_path: Path, hooks: list[Any]) -> None:
    def begin_another() -> None:
        hooks.clear()
        train(tmp_path, trainer={"max_steps": 5}, checkpoint={"every": 2})

    hooks.append(at_step(3, begin_another))
    with pytest.raises(FencedError, match=r"a newer run of this job \(attempt 2\)"):
        train(tmp_path, checkpoint={"every": 2, "save_on_error": "warn"})
    assert list_steps(tmp_path) == [4, 5]


def test_what_a_killed_run_left_is_cleared_away_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, trainer={"max_steps": 2})
    left = tmp_path / "checkpoints" / "step-00000004-a0001"
    (left / "done").mkdir(parents=True)
    (left / "r00000-of-00001.safetensors").write_bytes(b"half")
    train(tmp_path)
    assert not left.exists()


def test_a_store_that_cannot_tell_who_was_first_is_refused_unless_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = storage.create_bytes

    def create(url: str, data: bytes, *, exclusive: bool = True) -> None:
        storage.write_bytes(url, data) if exclusive else original(url, data, exclusive=False)

    monkeypatch.setattr(storage, "create_bytes", create)
    with pytest.raises(CheckpointError, match="lets a file be created twice") as caught:
        train(tmp_path / "a")
    assert "checkpoint.single_writer=true" in caught.value.hint
    train(tmp_path / "b", checkpoint={"single_writer": True})
    assert list_steps(tmp_path / "b") == [8]


def test_files_are_for_their_owner_and_group(tmp_path: Path) -> None:
    os.umask(0o022)
    train(tmp_path, trainer={"max_steps": 1})
    for path in (tmp_path / "checkpoints").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
