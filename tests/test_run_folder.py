"""What lies in a run's folder when a run goes on."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsjob import run_folder
from dsjob.errors import DsjobError, FencedError, StorageError
from dsjob.run_folder import Claim, make_run_dir, read_resolved, read_result, supersede_metrics


def write(folder: Path, steps: list[int], name: str = "metrics.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in steps))
    return path


def read(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    path = folder / name
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("step", "kept", "aside"),
    [(3, [1, 2, 2, 3], [4, 5]), (5, [1, 2, 2, 3, 4, 5], []), (9, [1, 2, 2, 3, 4, 5], []), (0, [], [1, 2, 2, 3, 4, 5])],
)
def test_what_a_run_takes_anew_is_set_aside(tmp_path: Path, step: int, kept: list[int], aside: list[int]) -> None:
    write(tmp_path, [1, 2, 2, 3, 4, 5])  # an evaluation is a second line of its step
    supersede_metrics(str(tmp_path), step)
    assert (read(tmp_path), read(tmp_path, "metrics-superseded.jsonl")) == (kept, aside)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "metrics.jsonl"  # and nothing temporary


def test_a_folder_without_metrics_stays_as_it_is(tmp_path: Path) -> None:
    supersede_metrics(str(tmp_path), 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', "7", "null", '{"loss": 1.5}', '{"step": "3"}', "\xff"])
def test_a_line_that_is_cut_short_is_set_aside(tmp_path: Path, rest: str) -> None:
    path = write(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes() + rest.encode("latin-1"))
    supersede_metrics(str(tmp_path), 2)
    assert read(tmp_path) == [1, 2]
    assert (tmp_path / "metrics-superseded.jsonl").read_bytes() == rest.encode("latin-1") + b"\n"


def test_a_last_line_without_its_end_gets_one(tmp_path: Path) -> None:
    path = write(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    supersede_metrics(str(tmp_path), 2)
    assert path.read_bytes()[-1:] == b"\n"
    assert read(tmp_path) == [1, 2]


def test_a_kill_between_the_two_writes_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [7], "metrics-superseded.jsonl")
    write(tmp_path, [1, 2, 3])

    def die(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)  # of the copy: before metrics.jsonl changes
        with pytest.raises(KeyboardInterrupt):
            supersede_metrics(str(tmp_path), 1)
    assert read(tmp_path) == [1, 2, 3]
    supersede_metrics(str(tmp_path), 1)
    assert (read(tmp_path), read(tmp_path, "metrics-superseded.jsonl")) == ([1], [7, 2, 3])


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f'{{"step": {step}, "loss": 1.5, "pad": "{"x" * 160}"}}\n' for step in range(1, 200_001))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    before = count_bytes_read()
    supersede_metrics(str(tmp_path), 199_000)
    assert size > 35e6
    assert count_bytes_read() - before < 1e6  # the 1,000 lines that it moves, twice, and a block
    assert (read(tmp_path)[-1], len(read(tmp_path))) == (199_000, 199_000)
    assert read(tmp_path, "metrics-superseded.jsonl") == [*range(199_001, 200_001)]


def count_bytes_read() -> int:
    """What this process has read so far, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_job_that_slurm_has_queued_again_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = f"{tmp_path}/%name/%time"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    first = make_run_dir(pattern, "net")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert make_run_dir(pattern, "net") == first
    assert make_run_dir(pattern, "net") == first
    assert make_run_dir(pattern, "other") != first
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert make_run_dir(pattern, "net") != first
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert make_run_dir(pattern, "net") != first


def test_a_job_of_slurm_that_runs_twice_without_a_restart_has_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert make_run_dir(f"{tmp_path}/%time", "net") != make_run_dir(f"{tmp_path}/%time", "net")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", "5", ""])
def test_a_damaged_file_of_a_run_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    (tmp_path / "resolved.json").write_text(text)
    for read in (read_result, read_resolved):
        with pytest.raises(DsjobError, match="is no"):
            read(str(tmp_path))


def test_a_result_that_no_run_has_written_stays(tmp_path: Path) -> None:
    """A document may name any folder as output.dir."""
    (tmp_path / "result.json").write_text('{"accuracy": 1}')
    with pytest.raises(StorageError, match="no run has written this file"):
        run_folder.write_resolved(str(tmp_path), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]
    (tmp_path / "result.json").write_text('{"status": "failed"}')
    run_folder.write_resolved(str(tmp_path), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resolved.json"]


def test_a_folder_in_the_place_of_the_result_stays(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    (tmp_path / "result.json" / "kept").write_text("x")
    with pytest.raises(StorageError, match=r"result\.json: it is a folder"):
        run_folder.write_resolved(str(tmp_path), {})
    assert (tmp_path / "result.json" / "kept").read_text() == "x"


def test_the_newest_claim_alone_may_write(tmp_path: Path) -> None:
    old = Claim(str(tmp_path))
    with old.writing():
        pass
    new = Claim(str(tmp_path))
    for _ in range(2):
        with pytest.raises(FencedError, match=r"a newer run has begun in .*; this one no longer writes"), old.writing():
            raise AssertionError
        with new.writing():
            pass


def test_a_newer_run_begins_before_or_after_a_write_and_not_within(tmp_path: Path) -> None:
    old = Claim(str(tmp_path))
    with ThreadPoolExecutor() as pool:
        with old.writing():
            newer = pool.submit(Claim, str(tmp_path))
            time.sleep(0.1)
            assert not newer.done()
        newer.result()
    with pytest.raises(FencedError), old.writing():
        raise AssertionError


def test_a_suspended_run_does_not_hold_up_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_PAUSE", 0.001)
    with Claim(str(tmp_path)).writing():
        Claim(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"\xff" * 99])
def test_a_damaged_count_of_starts_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".starts").write_bytes(content)
    claim = Claim(str(tmp_path))
    with claim.writing():
        pass
    (tmp_path / ".starts").unlink()  # by somebody who tidies up
    with claim.writing():
        pass


def test_starts_are_not_counted_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".starts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a symbolic link"):
        Claim(str(tmp_path))
    assert not (tmp_path / "elsewhere").exists()
