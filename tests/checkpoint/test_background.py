"""Saves in the background: what they write is what the foreground's would, and none ends in silence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small_jobs import at_step, list_steps, read_digests, train

from dsjob.checkpoint.live import background
from dsjob.checkpoint.live.prepared import PreparedSave
from dsjob.checkpoint.live.shards import write_record
from dsjob.errors import CheckpointError
from dsjob.ranks import patience

pytestmark = pytest.mark.usefixtures("hooks")


def test_saves_in_the_background_are_those_of_the_foreground(tmp_path: Path, whole: Path) -> None:
    train(tmp_path, checkpoint={"every": 1, "keep": 0, "async": True})
    assert list_steps(tmp_path) == list(range(1, 9))
    for step in range(1, 9):
        assert read_digests(tmp_path, step) == read_digests(whole, step)


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
    monkeypatch.setattr(patience, "TO_CATCH_UP", 0.0)
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
    monkeypatch.setattr(patience, "TO_CATCH_UP", 0.0)
    monkeypatch.setattr(background, "read_record", lambda *_: {"rank": 1, "slow": pause()})
    folder = tmp_path / "step-00000002-a0001"
    (folder / "done").mkdir(parents=True)
    write_record(str(folder), 1, {"rank": 1})
    running = begin_save_of_two_ranks(tmp_path, lambda records: (len(records), pause()))
    running.give_up(60)
    assert running.ended
    assert running.result[0] == 2


def pause() -> tuple[str, ...]:
    time.sleep(0.4)
    return ()
