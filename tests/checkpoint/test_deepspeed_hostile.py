"""Hostile DeepSpeed folders: a typed error each, nothing run, nothing written elsewhere, no memory taken."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hostile_deepspeed as hostile
import pytest
from deepspeed_data import RUNS
from programs import run_program

from dsjob.checkpoint.other.deepspeed.layout import list_numbers
from dsjob.checkpoint.other.torch_files import is_bounded

TYPED = ("CheckpointError", "CorruptCheckpointError", "NoCheckpointError", "StorageError")
SOURCES = ["z1_fp32_ws3_groups", "z3_fp32_ws3_frozen", "z0_bf16_ws2_plain"]


def read_watched(folders: Iterable[Path], cwd: Path) -> dict[str, tuple[str, str]]:
    """What reading each folder raised, and the digest of its weights where it raised nothing; in a watched child."""
    script = Path(hostile.__file__)
    done = run_program([sys.executable, script, *folders], cwd=cwd, timeout=500)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["events"] == []
    assert told["grown"] < 300 << 10, "KiB"
    assert not list(cwd.rglob(f"{hostile.MARKER}*"))
    return {Path(folder).name: (raised, digest) for folder, (raised, digest) in told["found"].items()}


def check(results: dict[str, tuple[str, str]]) -> None:
    for name, (raised, _) in results.items():
        assert raised.partition(":")[0] in TYPED, (name, raised)
        assert "Traceback" not in raised


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.full("z1_fp32_ws3_groups", "z0_bf16_ws2_plain")
def test_pickles_are_refused_at_every_place_of_every_file(source: str, tmp_path: Path) -> None:
    results = read_watched(hostile.make_pickles(RUNS[source], tmp_path), tmp_path)
    assert len(results) >= {"z0_bf16_ws2_plain": 10}.get(source, 40)
    check(results)
    for name, (raised, _) in results.items():
        assert "would execute code" in raised, name
        if name.endswith("system"):
            assert "posix.system" in raised, name


@pytest.mark.slow
def test_zips_that_lie_are_refused(tmp_path: Path) -> None:
    results = read_watched(hostile.make_zips(RUNS["z3_fp32_ws2_tied"], tmp_path), tmp_path)
    assert len(results) == 22
    check(results)


@pytest.mark.slow
def test_one_long_list_in_many_groups_is_counted_before_it_is_copied() -> None:
    numbers = list(range(1 << 16))
    with pytest.raises(ValueError, match="have more than"):
        list_numbers([{"params": numbers}] * (1 << 16))
    assert list_numbers([{"params": [0, 1]}, {"params": [2]}]) == [[0, 1], [2]]


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "folders").mkdir()
    results = read_watched(hostile.make_names(RUNS["z1_fp32_ws3_groups"], tmp_path / "folders"), tmp_path)
    assert len(results) == 16
    check(results)


@pytest.mark.slow
def test_trees_that_deepspeed_does_not_write_are_refused(tmp_path: Path) -> None:
    results = read_watched(hostile.make_lies(RUNS["z1_fp32_ws3_groups"], tmp_path), tmp_path)
    assert len(results) == 26
    unharmed = {name for name, (raised, _) in results.items() if not raised}
    assert unharmed <= {f"z1_fp32_ws3_groups-lie-shared_params-{n}" for n in (0, 1)}  # names of nothing
    check({name: result for name, result in results.items() if name not in unharmed})


COUNTS = ("global_steps", "dp_world_size", "mp_world_size", "frozen_param_shapes")
OTHERS = ("skipped_steps", "global_samples", "param_shapes", "module", "buffer_names", "shared_params", "lr_scheduler")


@pytest.mark.parametrize("keys", [COUNTS, pytest.param((*OTHERS, "num_experts", "mine"), marks=pytest.mark.slow)])
@pytest.mark.full("keys1")
def test_values_that_have_no_end_are_shortened(keys: tuple[str, ...], tmp_path: Path) -> None:
    """A list that holds one list eleven times, and so on for thirty levels, has no repr that anybody waits for."""
    source = "z1_fp32_ws3_groups"
    results = read_watched(hostile.make_bombs(RUNS[source], tmp_path, keys), tmp_path)
    assert len(results) == len(keys) * 8
    raised = {name: told for name, (told, _) in results.items() if told}
    check({name: (told, "") for name, told in raised.items()})
    assert all(len(told) < 1000 for told in raised.values()), max(raised.values(), key=len)[:2000]
    assert keys != COUNTS or all(f"{source}-{key}-tensor" in raised for key in keys)
    assert all(name in raised for name in results if name.endswith("bomb"))


def test_a_shared_list_counts_each_time() -> None:
    assert is_bounded({"a": hostile.nest(6)})
    assert not is_bounded({"a": hostile.nest(8)})
    assert is_bounded([["a" * 1_000_000] * 40])
    assert not is_bounded([["a" * 1_000_000] * 60])
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    assert not is_bounded(deep)
    deep.append(deep)
    assert not is_bounded(deep)


@pytest.mark.slow
@pytest.mark.parametrize("source", [SOURCES[0], *(pytest.param(s, marks=pytest.mark.full) for s in SOURCES[1:])])
def test_flipped_bits_are_found_or_change_nothing(source: str, tmp_path: Path) -> None:
    results = read_watched([RUNS[source], *hostile.make_flips(RUNS[source], tmp_path, 80)], tmp_path)
    (clean, right), *flipped = results.values()
    assert clean == ""
    found = [raised for raised, digest in flipped if digest != right]
    assert all(raised.partition(":")[0] in TYPED for raised in found), found
    assert len(found) > 20
