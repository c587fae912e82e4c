"""When checkpoints are made, and how a run finds its way back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import at_step, list_steps, read_digests, send, train

from dsjob import storage
from dsjob.checkpoint.live.state import TrainingState
from dsjob.errors import CheckpointError, CorruptCheckpointError, FencedError, Interrupted, Preempted

pytestmark = pytest.mark.usefixtures("hooks")


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
    with pytest.raises(Preempted, match=r"stopped by SIGTERM after step 4; saved .*step-00000004") as caught:
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
    told = rf"{shard}: the \d+ bytes at \d+, chunk \[.*\] of tensor '(model|optimizer)\..*', do not match their sha256"
    with pytest.raises(CorruptCheckpointError, match=told) as caught:
        train(tmp_path)
    assert "checkpoint.on_corrupt=previous" in caught.value.hint


@pytest.mark.parametrize("what", ["shard", "missing shard", "manifest", "record", "state", "job"])
@pytest.mark.full("job", "state", "record")
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
    assert "trying the previous checkpoint" in capsys.readouterr().out
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


def test_where_all_are_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    train(tmp_path, trainer={"max_steps": 4}, checkpoint={"every": 2})
    damage(tmp_path, 2)
    damage(tmp_path, 4)
    with pytest.raises(CorruptCheckpointError, match=r"all checkpoints are damaged; the newest: .*step-00000004"):
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
    with pytest.raises(CheckpointError, match=r"does not match the model: model\.fc\.weight is \[20, 8\] in the model"):
        train(tmp_path / "a", model=model, checkpoint={"resume": source})
    train(tmp_path / "b", model=model, checkpoint={"resume": source, "strict": False})
    assert "different shapes: model.fc.weight, model.fc.bias, model.out.weight" in capsys.readouterr().out


def test_an_older_run_finds_itself_fenced_at_its_next_save(tmp_path: Path, hooks: list[Any]) -> None:
    def begin_another() -> None:
        hooks.clear()
        # In a folder of its own; two runs in one folder are told before they save.
        train(tmp_path / "newer", trainer={"max_steps": 5}, checkpoint={"every": 2, "dir": f"{tmp_path}/checkpoints"})

    hooks.append(at_step(3, begin_another))
    with pytest.raises(FencedError, match=r"a newer run of this job has started in .* \(attempt 2\)"):
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
    with pytest.raises(CheckpointError, match="ignores exclusive file creation") as caught:
        train(tmp_path / "a")
    assert "checkpoint.single_writer=true" in caught.value.hint
    train(tmp_path / "b", checkpoint={"single_writer": True})
    assert list_steps(tmp_path / "b") == [8]


def test_files_are_for_their_owner_and_group(tmp_path: Path) -> None:
    os.umask(0o022)
    train(tmp_path, trainer={"max_steps": 1})
    for path in (tmp_path / "checkpoints").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
