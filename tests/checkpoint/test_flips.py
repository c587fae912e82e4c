"""Damage to a checkpoint: bits that flip anywhere, files that are cut, swapped, missing, or of another step.

Each is noticed by whoever uses the bytes, or changes nothing: then what is loaded is what was saved, to the bit, and
`verify` says where the damage is unless nothing reads those bytes.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from engines import make_engine, train_engine, whole_state

from dsjob.checkpoint.offline.verify import verify
from dsjob.engine.engine import Engine
from dsjob.errors import CheckpointError, NoCheckpointError

UNREAD = ("latest", "zero_to_fp32.py", "done/")  # a hint, a program, notes of the save: nothing reads them


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine, dict[str, torch.Tensor]]:
    """A root with steps 2 and 4, the engine that saved both, and the state at step 4."""
    root = (Path("/dev/shm") if os.path.isdir("/dev/shm") else tmp_path_factory.getbasetemp()) / f"flips-{os.getpid()}"
    engine = make_engine(0)
    for step in (2, 4):
        train_engine(engine, step - 2, 2)
        engine.save_checkpoint(str(root), client_state={"step": step})
    yield root, engine, {name: tensor.clone() for name, tensor in whole_state(engine).items()}  # type: ignore[misc]
    shutil.rmtree(root)


def find_outcome(root: Path, engine: Engine, expected: dict[str, torch.Tensor]) -> str:
    """`noticed` by loading; or `same`, what was loaded being what was saved; else what is wrong."""
    with torch.no_grad():
        for tensor in [*engine.state().model_tensors().values(), *engine.state().optimizer_tensors().values()]:
            tensor.zero_()
    try:
        _, client_state = engine.load_checkpoint(str(root), tag="global_step4")
    except (CheckpointError, NoCheckpointError):
        return "noticed"
    found = whole_state(engine)
    same = found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())
    return "same" if same and client_state == {"step": 4} and engine.global_steps == 4 else "wrong"


def is_told_by_verify(root: Path) -> bool:
    try:
        return any(one.damages for one in verify(str(root), "global_step4"))
    except CheckpointError:
        return True


def list_files(root: Path) -> list[Path]:
    """What belongs to step 4, and what lies in the root."""
    return [path for path in sorted(root.rglob("*")) if path.is_file() and "global_step2" not in str(path)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flips", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_bits_that_flip(saved: tuple[Path, Engine, dict[str, torch.Tensor]], flips: int) -> None:
    root, engine, expected = saved
    choose, outcomes = random.Random(0), Counter[str]()
    files = list_files(root)
    for number in range(flips):
        path = files[number % len(files)] if number % 2 else max(files, key=lambda file: file.stat().st_size)
        data = path.read_bytes()
        offset, bit = choose.randrange(len(data)), choose.randrange(8)
        place = f"{path.relative_to(root)} byte {offset} bit {bit}"
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :])
        try:
            outcome, told = find_outcome(root, engine, expected), is_told_by_verify(root)
        finally:
            path.write_bytes(data)
        assert outcome != "wrong", place
        assert told or outcome == "same", place
        if not told:
            outcome = "unread file" if any(part in place for part in UNREAD) else "record's attempt"
            assert outcome == "unread file" or path.parent.name == "commits", place
        outcomes[outcome] += 1
    print(f"{flips} flips: {dict(outcomes)}")  # noqa: T201
    assert outcomes["noticed"] > flips / 2
    assert find_outcome(root, engine, expected) == "same"


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "shard", "record"])
def test_files_that_are_cut(saved: tuple[Path, Engine, dict[str, torch.Tensor]], name: str) -> None:
    root, engine, expected = saved
    path = find_file(root, name)
    data = path.read_bytes()
    for length in sorted({0, 1, 8, len(data) // 2, len(data) - 1, *random.Random(1).sample(range(len(data)), 12)}):
        path.write_bytes(data[:length])
        try:
            assert find_outcome(root, engine, expected) == "noticed", length
            assert is_told_by_verify(root)
        finally:
            path.write_bytes(data)


def find_file(root: Path, name: str, step: int = 4) -> Path:
    if name == "record":
        return root / "commits" / f"global_step{step}.json"
    folder = next(root.glob(f"global_step{step}-a*"))
    return next(folder.glob("r0*")) if name == "shard" else folder / name


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "shard", "record"])
@pytest.mark.parametrize("change", ["stale", "missing"])
def test_files_that_are_stale_or_missing(
    saved: tuple[Path, Engine, dict[str, torch.Tensor]], name: str, change: str
) -> None:
    root, engine, expected = saved
    path = find_file(root, name)
    data = path.read_bytes()
    path.unlink()
    if change == "stale":
        shutil.copy(find_file(root, name, step=2), path)
    try:
        assert find_outcome(root, engine, expected) == "noticed"
        assert is_told_by_verify(root)
    finally:
        path.write_bytes(data)


def test_swapped_shards_of_four_ranks(tmp_path: Path) -> None:
    """Every pair, by the writer of tests: what is wrong is found by its digest, since all have one size."""
    from plain_checkpoint import floats, save

    save(tmp_path, {"model.w": floats(8, 3), "model.v": floats(4, 5)}, world=4)
    folder = next(tmp_path.glob("step-*"))
    shards = sorted(folder.glob("r*.safetensors"))
    assert len({path.stat().st_size for path in shards}) == 1
    for i, first in enumerate(shards):
        for second in shards[i + 1 :]:
            data = first.read_bytes(), second.read_bytes()
            first.write_bytes(data[1]), second.write_bytes(data[0])
            damages = [d for one in verify(str(tmp_path)) for d in one.damages if d.tensor]
            assert {damage.tensor for damage in damages} == {"model.w", "model.v"}
            assert len(damages) == 4
            first.write_bytes(data[0]), second.write_bytes(data[1])
