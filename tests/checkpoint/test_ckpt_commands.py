"""`dsjob ckpt`: each subcommand on whole and broken roots, by path and by URL, as text and as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from plain_checkpoint import Raw, commit_manifest, floats, random_raw, save
from safetensors.torch import load_file, save_file

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.offline.compare import Difference, compare
from dsjob.checkpoint.offline.convert import convert
from dsjob.cli import main
from dsjob.planning.report import show_bytes

TENSORS = {
    "model.w": floats(40, 30),
    "model.b": random_raw("BF16", (7,), 1),
    "model.n": random_raw("I64", (), 4, role="buffer"),
    "model.ice": floats(3, role="frozen"),
    "optimizer.w.exp_avg": floats(40, 30, role="optimizer"),
}


def finish(folder: Path, **values: Any) -> Path:
    """Adds what the small writer of tests leaves out: state.json and job.json."""
    text = json.dumps({"counters": {"global_steps": 120}, "optimizer": {"class": "AdamW", "groups": []}, **values})
    (folder / "state.json").write_text(text)
    (folder / "job.json").write_text(json.dumps({"name": "tiny", "bf16": {"enabled": True}}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, separators=(",", ":")))
    tag, _, attempt = folder.name.rpartition("-a")
    if (folder.parent / "commits" / f"{tag}.json").exists():
        commit_manifest(folder.parent, folder, tag, manifest["step"], int(attempt))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 100 and 120 of a run, the second of two ranks and newer by attempt; a partial folder of 130."""
    root = tmp_path / "run" / "checkpoints"
    finish(save(root, {"model.w": floats(40, 30, seed=9)}, step=100))
    finish(save(root, TENSORS, step=120, attempt=2, aliases={"model.tied": "model.w"}))
    finish(save(root, TENSORS, step=130, commit=False))
    return root


def upload(folder: Path) -> str:
    """Copies a folder into fsspec's memory; its URL."""
    url = f"memory://{uuid.uuid4().hex}/run"
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{url}/{path.relative_to(folder)}", path.read_bytes())
    return url


@pytest.fixture(params=["local", "memory"])
def place(root: Path, request: pytest.FixtureRequest) -> str:
    """The run's folder, as a path or a URL."""
    return upload(root.parent) if request.param == "memory" else str(root.parent)


def ckpt(*arguments: object, code: int = 0) -> None:
    assert main(["ckpt", *map(str, arguments)]) == code


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    ckpt(*arguments, "--json", code=code)
    return json.loads(capsys.readouterr().out)


# --- ls ---


def test_ls_says_that_a_state_is_truncated(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(root / "step-00000120-a0002" / "state.json", 5)
    (found,) = [e for e in answer(capsys, "ls", root)["checkpoints"] if e["step"] == 120]
    assert found["state"] == "damaged"
    assert "state.json does not match the sha256" in found["problem"]


def test_ls_lists_every_state(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "ls", place)
    assert found["url"].endswith("run/checkpoints")
    rows = [
        (e["state"], e["tag"], e["step"], e["world_size"], e["zero_stage"], e["newest"]) for e in found["checkpoints"]
    ]
    assert rows == [
        ("committed", "step-00000100", 100, 2, 3, False),
        ("committed", "step-00000120", 120, 2, 3, True),
        ("partial", "step-00000130", None, None, None, False),
    ]
    assert all(abs(entry["saved"] - time.time()) < 600 for entry in found["checkpoints"])
    assert all(entry["size"] > 4000 for entry in found["checkpoints"])
    ckpt("ls", place)
    text = capsys.readouterr().out
    assert "newest" in text
    assert "s ago" in text


@pytest.mark.parametrize(
    "below", ["", "/checkpoints", "/checkpoints/step-00000120-a0002", "/checkpoints/step-00000100"]
)
def test_ls_finds_the_root_from_anywhere(place: str, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(answer(capsys, "ls", place + below)["checkpoints"]) == 3


def test_ls_says_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = root / "step-00000100-a0001", root / "step-00000120-a0002"
    (old / "state.json").unlink()
    os.truncate(new / "r00001-of-00002.safetensors", 100)
    (root / "commits" / "best.json").write_text("{")
    (root / "superseded").mkdir()
    (root / "superseded" / "step-00000130-a0001.json").write_text("{}")
    found = answer(capsys, "ls", root)["checkpoints"]
    assert [(e["state"], e["tag"]) for e in found] == [
        ("damaged", "step-00000100"),
        ("damaged", "step-00000120"),
        ("damaged", "best"),
        ("superseded", "step-00000130"),
    ]
    problems = [entry["problem"] for entry in found]
    assert "state.json is missing" in problems[0]
    assert "has 100 bytes; the manifest says" in problems[1]
    assert "is not valid JSON" in problems[2]
    assert not any(entry["newest"] for entry in found)
    ckpt("ls", root)
    assert "state.json is missing" in capsys.readouterr().out


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "info", "verify", "gc"):
        ckpt(command, tmp_path, code=1)
        assert "no committed checkpoint in" in (text := capsys.readouterr().err) or "no checkpoint in" in text
    ckpt("copy", tmp_path, tmp_path / "there", code=1)
    ckpt("diff", tmp_path, tmp_path / "there", code=1)
    assert not (tmp_path / "there").exists()


# --- info ---


def test_info(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "info", place)
    assert found.items() >= {
        "tag": "step-00000120", "step": 120, "world_size": 2, "zero_stage": 3, "job": "tiny", "precision": "bf16",
        "optimizer": "AdamW",
    }.items()  # fmt: skip
    assert found["counters"] == {"global_steps": 120}
    assert found["parameters"] == 40 * 30 + 7 + 3
    assert found["roles"]["frozen"] == {"tensors": 1, "bytes": 12}
    assert found["dtypes"]["BF16"] == {"tensors": 1, "bytes": 14}
    assert found["tensors"]["model.w"] == {"role": "parameter", "dtype": "F32", "shape": [40, 30], "bytes": 4800}
    assert found["aliases"] == {"model.tied": "model.w"}
    ckpt("info", place, "--tag", "step-00000100", "--tensors")
    text = capsys.readouterr().out
    assert "model.w" in text
    assert "[40, 30]" in text


def test_info_of_several_models(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(root / "step-00000120-a0002", optimizer={"student": {"class": "Adam"}, "teacher": {}})
    assert answer(capsys, "info", root)["optimizer"] == {"student": "Adam"}
    ckpt("info", root)
    assert "student: Adam" in capsys.readouterr().out


# --- verify ---


def test_verify_whole(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "verify", place, "--all")
    assert [(one["tag"], one["damages"], one["unchecked"]) for one in found] == [
        ("step-00000100", [], 0),
        ("step-00000120", [], 0),
    ]
    ckpt("verify", place)
    assert capsys.readouterr().out.startswith("step-00000120  intact  ")


def test_verify_names_every_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "step-00000120-a0002"
    manifest = json.loads((folder / "manifest.json").read_text())
    chunk = manifest["tensors"]["model.w"]["chunks"][1]
    for name, offset in (("r00001-of-00002.safetensors", chunk["start"] + 5), ("r00000-of-00002.safetensors", 20)):
        data = bytearray((folder / name).read_bytes())
        data[offset] ^= 4
        (folder / name).write_bytes(data)
    (folder / "state.json").write_text("{}")
    found = answer(capsys, "verify", root, "--all", code=1)
    damages = found[1]["damages"]
    assert [(d["file"], d["tensor"], d["offset"], d["length"]) for d in damages] == [
        (f"{folder.name}/r00000-of-00002.safetensors", None, None, None),
        (f"{folder.name}/r00001-of-00002.safetensors", "model.w", chunk["start"], chunk["length"]),
        (folder.name, None, None, None),
    ]
    ckpt("verify", root, code=1)
    text = capsys.readouterr().out
    assert "DAMAGED in 3 files" in text
    assert f"tensor 'model.w', the {chunk['length']} bytes at {chunk['start']}" in text
    ckpt("verify", root, "--tag", "step-00000100")


def test_verify_a_manifest_and_a_record(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000120-a0002" / "manifest.json").write_text("{}")
    found = answer(capsys, "verify", root, "--all", code=1)
    assert "does not match the sha256" in found[1]["damages"][0]["what"]
    ckpt("verify", root, "--all", "--tag", "step-00000120", code=2)


@pytest.mark.parametrize("change", ["missing", "short", "long"])
def test_verify_files_of_another_size(root: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step-00000120-a0002" / "r00001-of-00002.safetensors"
    size = path.stat().st_size
    path.unlink() if change == "missing" else os.truncate(path, size + (9 if change == "long" else -9))
    (found,) = answer(capsys, "verify", root, code=1)
    assert found["damages"]
    assert all(damage["file"].endswith(path.name) for damage in found["damages"])


def test_verify_prints_one_line_for_a_truncated_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step-00000120-a0002" / "r00000-of-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, 9)
    (found,) = answer(capsys, "verify", root, code=1)
    tensors = sorted({damage["tensor"] for damage in found["damages"] if damage["tensor"]})
    assert len(tensors) > 1
    ckpt("verify", root, code=1)
    _, line, advice = capsys.readouterr().out.splitlines()
    assert advice.startswith("next: restore the damaged files from a copy")
    what = f"it has 9 bytes; the manifest says {size}; {len(tensors)} tensors damaged, such as {tensors[0]!r}"
    assert line == f"  {path.parent.name}/{path.name}: {what} (--json lists all)"


# --- diff ---


def test_diff_of_one_with_itself(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt("diff", place, place)
    assert "6 tensors equal, 0 different" in capsys.readouterr().out  # the tied name is one of them
    found = answer(capsys, "diff", place, place)
    assert len(found) == 6
    assert {one["kind"] for one in found} == {"same"}


def test_diff_of_two_tags(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        one["name"]: one for one in answer(capsys, "diff", root, "-t", "step-00000100", "-t", "step-00000120", code=1)
    }
    first, second = floats(40, 30, seed=9).array.astype("f8"), floats(40, 30).array.astype("f8")
    assert found["w"]["kind"] == "values"
    assert found["w"]["max_abs"] == np.abs(first - second).max()
    relative = np.abs(first - second) / np.maximum(np.abs(first), np.abs(second))
    assert found["w"]["max_rel"] == relative.max()
    assert found["w"]["elements"] == (first != second).sum()
    assert found["optimizer.w.exp_avg"]["kind"] == found["b"]["kind"] == "only in B"
    ckpt("diff", root / "step-00000100-a0001", root / "step-00000120", code=1)
    assert "max abs" in capsys.readouterr().out


def test_diff_with_converted_weights(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(str(root), str(tmp_path / "one.safetensors"), to="fp32")
    convert(str(root), str(tmp_path / "many"), to="fp32", max_shard_size=100)
    ckpt("diff", tmp_path / "one.safetensors", tmp_path / "many")
    capsys.readouterr()
    found = {one["name"]: one for one in answer(capsys, "diff", root, tmp_path / "many", code=1)}
    assert found["w"]["kind"] == "same"
    assert found["b"]["kind"] == "dtype"  # bf16 in the checkpoint
    assert found["b"]["max_abs"] == 0
    assert "optimizer.w.exp_avg" not in found
    state = load_file(tmp_path / "one.safetensors")
    state["w"][3, 4] += 0.5
    state["ice"] = state["ice"][:2].clone()
    save_file(state, tmp_path / "other.safetensors")
    found = {
        one["name"]: one
        for one in answer(capsys, "diff", tmp_path / "one.safetensors", tmp_path / "other.safetensors", code=1)
    }
    assert (found["w"]["elements"], round(found["w"]["max_abs"], 6)) == (1, 0.5)
    assert (found["ice"]["a"], found["ice"]["b"]) == ("F32[3]", "F32[2]")
    ckpt("diff", tmp_path / "many", root, "-t", "x", code=2)


def one_tensor(tmp_path: Path, dtype: str, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Difference:
    save(tmp_path / "a", {"model.x": Raw(dtype, left)}, world=2)
    save(tmp_path / "b", {"model.x": Raw(dtype, right)}, world=3)
    (found,) = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    return found


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_diff_of_eight_bits(tmp_path: Path, dtype: str) -> None:
    codes = np.arange(256, dtype="u1")
    found = one_tensor(tmp_path, dtype, codes, codes[::-1].copy())
    kind = torch.float8_e4m3fn if dtype == "F8_E4M3" else torch.float8_e5m2
    values = torch.from_numpy(codes).view(kind).double().numpy()
    finite = np.isfinite(values) & np.isfinite(values[::-1])
    other = (values != values[::-1]) & ~(np.isnan(values) & np.isnan(values[::-1]))
    assert found.elements == other.sum()
    if np.isfinite(values[other]).all() and np.isfinite(values[::-1][other]).all():
        assert found.max_abs == np.abs(values - values[::-1])[finite].max()
    else:
        assert found.max_abs == np.inf


def test_diff_of_values_that_are_hard(tmp_path: Path) -> None:
    found = one_tensor(tmp_path, "F32", np.array([0.0, np.nan, 1], "<f4"), np.array([-0.0, np.nan, 1], "<f4"))
    assert (found.kind, found.elements, found.max_abs) == ("values", 0, 0)  # other bytes, the same values
    shutil.rmtree(tmp_path / "a"), shutil.rmtree(tmp_path / "b")
    found = one_tensor(tmp_path, "F32", np.array([np.nan, 1], "<f4"), np.array([1, 1], "<f4"))
    assert (found.elements, found.max_abs) == (1, np.inf)
    shutil.rmtree(tmp_path / "a"), shutil.rmtree(tmp_path / "b")
    found = one_tensor(tmp_path, "I64", np.array([1 << 62], "<i8"), np.array([(1 << 62) + 1], "<i8"))
    assert (found.elements, found.max_abs) == (1, 1)
    shutil.rmtree(tmp_path / "a"), shutil.rmtree(tmp_path / "b")
    found = one_tensor(tmp_path, "C64", np.array([3 + 4j], "<c8"), np.array([0], "<c8"))
    assert found.max_abs == 5


def test_diff_of_other_boxes_and_many_blocks(tmp_path: Path) -> None:
    count = layout.BUFFER // 8 + 999
    left, right = floats(count).array, floats(count).array.copy()
    right[-1] += 2
    found = one_tensor(tmp_path, "F32", left, right)
    assert (found.elements, found.size) == (1, count)


def test_diff_of_a_file_that_is_none(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    ckpt("diff", root, tmp_path / "w.safetensors", code=1)
    assert "is not a valid safetensors file" in capsys.readouterr().err
    ckpt("diff", root, code=2)


# --- gc ---


def age(folder: Path, seconds: float) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (time.time() - seconds,) * 2)


def test_gc_leaves_what_may_be_alive(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The partial folder is of attempt 1, and attempt 2 has begun: it goes an hour after its last write."""
    partial = root / "step-00000130-a0001"
    mine = finish(save(root, TENSORS, step=140, attempt=2, commit=False))
    found = answer(capsys, "gc", root)["found"]
    assert {entry["path"]: entry["kept"] for entry in found} == {
        partial.name: "written too recently",
        mine.name: "a running job may still be writing it",
    }
    age(partial, 2 * 3600)
    age(mine, 2 * 3600)
    found = answer(capsys, "gc", root, "--dry-run")["found"]
    assert [entry["path"] for entry in found if not entry["kept"]] == [partial.name]
    assert partial.exists()
    ckpt("gc", root, "--older-than", "3h")
    assert partial.exists()
    capsys.readouterr()
    ckpt("gc", root)
    assert "deleted 1" in capsys.readouterr().out
    assert not partial.exists()
    age(mine, 25 * 3600)
    ckpt("gc", root)
    assert not mine.exists()
    assert len(answer(capsys, "ls", root)["checkpoints"]) == 2
    ckpt("verify", root, "--all")


def test_gc_by_url(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = upload(root)
    ckpt("gc", url, "--older-than", "0s")
    capsys.readouterr()
    states = [entry["state"] for entry in answer(capsys, "ls", url)["checkpoints"]]
    assert states == ["committed", "committed"]


def test_gc_of_what_was_superseded_and_of_temporary_files(root: Path) -> None:
    from dsjob.checkpoint.root.catalog import Catalog

    Catalog(str(root)).set_aside(100)
    (root / "superseded" / "step-00000999-a0001.json").write_text("{}")
    temporary = root / "commits" / f"x.json.{uuid.uuid4().hex}.tmp"
    temporary.write_text("")
    converted = root / ".model.safetensors.0123abcd.tmp"
    converted.write_text("")
    damaged = root / "commits" / "best.json"
    damaged.write_text("{")
    ckpt("gc", root)
    assert (root / "step-00000120-a0002").exists()
    age(root, 2 * 3600)
    ckpt("gc", root)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [
        "commits",
        "step-00000100-a0001",
        "superseded",
    ]
    assert not list((root / "superseded").iterdir())
    assert not temporary.exists()
    assert not converted.exists()
    assert damaged.exists()


def test_gc_leaves_what_a_damaged_record_may_mean(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dsjob.checkpoint.root.catalog import Catalog

    (root / "commits" / "step-00000100.json").write_text("{")
    Catalog(str(root)).set_aside_damaged(["step-00000120"])
    before = {path for path in root.rglob("*") if "step-00000130" not in path.name and "130" not in path.parent.name}
    age(root, 1e6)
    ckpt("gc", root)
    assert "is unreadable" in capsys.readouterr().out
    assert before <= set(root.rglob("*"))
    assert not (root / "step-00000130-a0001").exists()


def test_gc_deletes_nothing_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "my-project-a1234"
    mine.mkdir()
    (mine / "thesis.tex").write_text("precious")
    age(mine, 1e7)
    ckpt("gc", tmp_path, code=1)
    save(tmp_path, TENSORS)
    ckpt("gc", tmp_path)
    assert (mine / "thesis.tex").exists()
    ckpt("gc", tmp_path, "--older-than", "soon", code=2)
    assert "is not an age" in capsys.readouterr().err


def test_sizes_say_what_they_count(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((root / "step-00000120-a0002").rglob("*"))
    shards = show_bytes(sum(file.stat().st_size for file in files if file.suffix == ".safetensors"))
    everything = show_bytes(sum(file.stat().st_size for file in files if file.is_file()))
    printed = {}
    for name, more in (("ls", []), ("info", []), ("verify", []), ("copy", [tmp_path / "b"])):
        ckpt(name, root, *more)
        printed[name] = capsys.readouterr().out
    heading, line = (re.split("  +", text) for text in printed["ls"].splitlines()[2:5:2])
    assert dict(zip(heading, line, strict=False))["all files"] == everything
    for name in ("info", "verify", "copy"):
        assert f"{shards} of weights and optimizer" in printed[name]


# --- copy ---


def read_all(url: str) -> dict[str, bytes]:
    return {name: storage.read_bytes(storage.join(url, name)) for name in storage.find_files(url)}


def test_copy_there_and_back(root: Path, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{uuid.uuid4().hex}/copy"
    found = answer(capsys, "copy", place, url)
    assert [(one["tag"], one["size"] > 0) for one in found] == [("step-00000100", True), ("step-00000120", True)]
    ckpt("verify", url, "--all")
    ckpt("copy", url, tmp_path / "back")
    ckpt("diff", tmp_path / "back", root)
    back, first = read_all(str(tmp_path / "back")), read_all(str(root))
    assert back["latest"] == b"step-00000120\n"
    assert "zero_to_fp32.py" in back
    for name, data in back.items():
        if name.startswith("step-00000120-a0001/"):
            assert data == first[name.replace("-a0001", "-a0002")], name
    capsys.readouterr()
    assert [one["size"] for one in answer(capsys, "copy", root, tmp_path / "back")] == [0, 0]  # all there already


def test_copy_of_one_tag(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt("copy", root, tmp_path / "b", "--tag", "step-00000120")
    ckpt("copy", root / "step-00000100-a0001", tmp_path / "b")
    assert storage.read_text(str(tmp_path / "b" / "latest")) == "step-00000120\n"  # an older one is not the latest
    first = answer(capsys, "ls", tmp_path / "b")["checkpoints"][0]
    assert first["tag"] == "step-00000100"
    ckpt("copy", root, root, code=2)
    ckpt("copy", root, tmp_path / "c", "--tag", "step-7", code=1)
    assert not (tmp_path / "c").exists()


def test_a_copy_into_a_runs_folder_lies_beside_its_own(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    ckpt("copy", root, run / "checkpoints", "--tag", "step-00000100")
    ckpt("copy", root, run)
    assert not (run / "commits").exists()
    assert len(list((run / "checkpoints" / "commits").iterdir())) == 2
    ckpt("copy", run, run, code=2)


def test_one_damaged_record_hides_no_other_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "commits" / "step-00000120.json").write_text("{")
    assert main(["ckpt", "verify", str(root), "--all", "--json"]) == 1
    found = {one["tag"]: bool(one["damages"]) for one in json.loads(capsys.readouterr().out)}
    assert found["step-00000120"]
    assert not found["step-00000100"]


def test_a_copy_keeps_metrics_and_pins(root: Path, tmp_path: Path) -> None:
    record = root / "commits" / "step-00000120.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "metrics": {"loss": 0.5}}))
    (root / "pinned").mkdir()
    (root / "pinned" / "step-00000100").touch()
    ckpt("copy", root, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "commits" / record.name).read_text())["metrics"] == {"loss": 0.5}
    assert os.listdir(tmp_path / "b" / "pinned") == ["step-00000100"]


def test_a_copy_of_a_copy_was_saved_when_the_first_was(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(root / "commits" / "step-00000100.json", (1e9, 1e9))
    url = f"memory://{uuid.uuid4().hex}/copy"
    ckpt("copy", root, url)
    ckpt("copy", url, tmp_path / "b")
    for place in (url, tmp_path / "b"):
        first, second = answer(capsys, "ls", place)["checkpoints"]
        assert first["saved"] == 1e9
        assert second["saved"] == (root / "commits" / "step-00000120.json").stat().st_mtime


@pytest.mark.parametrize("told", ["NaN", "1e999", "-1", "true", '"1"', "1" * 400, "null"])
def test_a_time_that_is_none_is_passed_over(root: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = root / "commits" / "step-00000120.json"
    record.write_text(record.read_text().replace("{", f'{{"saved": {told}, ', 1))
    assert answer(capsys, "ls", root)["checkpoints"][1]["saved"] == record.stat().st_mtime
    ckpt("ls", root)


def test_copy_of_what_is_damaged_leaves_nothing(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step-00000120-a0002" / "r00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ckpt("copy", root, tmp_path / "b", code=1)
    assert "r00001-of-00002.safetensors, tensor" in capsys.readouterr().err
    found = answer(capsys, "ls", tmp_path / "b")["checkpoints"]
    assert [(entry["state"], entry["tag"]) for entry in found] == [("committed", "step-00000100")]


def test_copy_over_another_checkpoint(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(save(tmp_path / "b", {"model.w": floats(3)}, step=120))
    before = read_all(str(tmp_path / "b"))
    ckpt("copy", root, tmp_path / "b", "--tag", "step-00000120", code=1)
    assert "already has a different checkpoint step-00000120" in capsys.readouterr().err
    assert read_all(str(tmp_path / "b")) == before


def test_copy_killed_in_the_middle_can_be_repeated(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsjob.checkpoint.root.catalog import Catalog

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", lambda *args, **more: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Catalog, "discard", lambda *args: None)  # as after a kill
        ckpt("copy", root, tmp_path / "b", code=130)
    assert (tmp_path / "b" / "step-00000100-a0001").exists()
    ckpt("copy", root, tmp_path / "b")
    ckpt("verify", tmp_path / "b", "--all")


# --- all of them ---


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from dsjob.checkpoint.root import garbage, inventory;"
        "from dsjob.checkpoint.offline import compare, transfer, verify;"
        "import dsjob.cli.ckpt; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["ls", "verify", "info"])
def test_folders_of_other_programs_are_told_apart(
    root: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    for step in (2, 10):
        shutil.copytree(root, tmp_path / "hf" / f"checkpoint-{step}")
    ckpt(command, tmp_path / "hf", code=1)
    told = capsys.readouterr().err
    assert f"so name one: {tmp_path}/hf/checkpoint-2, {tmp_path}/hf/checkpoint-10\n" in told
    ckpt(command, tmp_path / "hf/checkpoint-10")
    theirs = tmp_path / "theirs" / "global_step3"
    theirs.mkdir(parents=True)
    (theirs / "mp_rank_00_model_states.pt").touch()
    for place in (theirs, theirs.parent):  # without the file `latest`
        ckpt(command, place, code=1)
        assert f"DeepSpeed saved this; dsjob convert {place} OUT" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["ls"], ["copy", "a"], ["ls", "nosuch://bucket/x"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", *arguments]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err
