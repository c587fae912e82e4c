"""The standalone converter, which needs no package: in some of the tests, the interpreter has none (`run_isolated`)."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_checkpoint import (
    STORED,
    Box,
    Raw,
    commit_manifest,
    floats,
    random_raw,
    read_safetensors,
    rows,
    run_script,
    save,
    save_sparse,
)
from safetensors.torch import load_file
from torch import nn

from dsjob.checkpoint.format import zero_to_fp32 as plain

SCRIPT = Path(plain.__file__)
TAG = "step-00000120"


def run_isolated(
    *arguments: object, cwd: Path | None = None, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """Runs the script isolated and without site-packages: the standard library is all that it can import."""
    command = [sys.executable, "-I", "-S", str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def convert(*arguments: object) -> str:
    done = run_script(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(code: int, *arguments: object) -> str:
    """Runs the script, which has to fail with one line; that line."""
    done = run_script(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith("zero_to_fp32: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def as_fp32(raw: Raw) -> tuple[str, tuple[int, ...], bytes]:
    """What the output has to hold for a saved tensor."""
    array = raw.array
    if raw.dtype == "BF16":
        return "F32", array.shape, (array.astype("<u4") << 16).tobytes()
    if raw.dtype in ("F16", "F64"):
        with np.errstate(over="ignore", invalid="ignore"):
            return "F32", array.shape, array.astype("<f4").tobytes()
    return raw.dtype, array.shape, array.tobytes()


def numbers(dtype: str, shape: tuple[int, ...], seed: int) -> Raw:
    """Random bits, but without NaN where they are converted: a NaN's bits are the subject of other tests."""
    raw = random_raw(dtype, shape, seed)
    if dtype in ("F16", "F64"):
        raw = raw._replace(array=np.where(np.isnan(raw.array), 1, raw.array).astype(STORED[dtype]).reshape(shape))
    return raw


# --- what is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_dtype_and_shape(tmp_path: Path, world: int) -> None:
    shapes = [(7, 5), (1, 3), (16,), (3, 2, 2), (), (0, 4), (2, 0)]
    tensors = {
        f"model.{dtype}.{i}": numbers(dtype, shape, i) for dtype in STORED for i, shape in enumerate(shapes, start=1)
    }
    tensors["optimizer.F32.1.exp_avg"] = floats(7, 5, role="optimizer")
    save(tmp_path / "c", tensors, world=world)
    assert run_isolated(tmp_path / "c", tmp_path / "out").returncode == 0
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert found == {name[6:]: as_fp32(raw) for name, raw in tensors.items() if raw.role != "optimizer"}
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(found)
    for name, (_, shape, data) in found.items():
        assert tuple(loaded[name].shape) == shape
        assert loaded[name].reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() == data if data else True


def test_all_values_of_bf16_and_fp16(tmp_path: Path) -> None:
    codes = np.arange(1 << 16, dtype="<u2")
    save(tmp_path / "c", {"model.b": Raw("BF16", codes), "model.h": Raw("F16", codes.view("<f2"))})
    convert(tmp_path / "c", tmp_path / "out")
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(np.frombuffer(found["b"][2], "<u4"), codes.astype("<u4") << 16)
    half = np.frombuffer(found["h"][2], "<u4")
    nan = np.isnan(codes.view("<f2"))
    assert np.array_equal(half[~nan], codes.view("<f2").astype("<f4").view("<u4")[~nan])
    payload = (codes.astype("<u4") & 0x8000) << 16 | 0x7F800000 | (codes.astype("<u4") & 0x3FF) << 13
    assert np.array_equal(half[nan], payload[nan])


def test_f64_is_rounded_to_nearest(tmp_path: Path) -> None:
    values = np.array([0.1, 1 + 2**-24, 1 + 3 * 2**-24, 1e300, -1e300, 1e-320, np.inf, np.nan, -0.0], "<f8")
    save(tmp_path / "c", {"model.x": Raw("F64", values)})
    convert(tmp_path / "c", tmp_path / "out")
    found = np.frombuffer(read_safetensors(tmp_path / "out" / "model.safetensors")["x"][2], "<f4")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype("<f4"))
    assert np.signbit(found[-1])


def test_strict_load_of_a_model_with_tied_weights(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.emb.weight

    model = Model()
    state = model.state_dict()
    stored = {torch.float32: "F32", torch.int64: "I64"}
    tensors = {
        f"model.{name}": Raw(stored[value.dtype], value.numpy(), "parameter" if "weight" in name else "buffer")
        for name, value in state.items()
        if name != "head.weight"
    }
    save(tmp_path / "c", tensors, world=4, aliases={"model.head.weight": "model.emb.weight"})
    text = convert(tmp_path / "c", tmp_path / "out")
    fresh = Model()
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert f"{len(state)} tensors, {6 * 11 + 6:,} parameters" in text
    digest = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert f"sha256 {digest}" in text


def test_the_printed_way_to_load_works(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model.weight": floats(3, 4), "model.bias": floats(3)})
    for limit in ("5GB", "20B"):
        text = convert(tmp_path / "c", tmp_path / limit, "--max-shard-size", limit)
        code = text.split("load with: ")[1].replace("\n           ", "\n")
        model = nn.Linear(4, 3)
        exec(code, {"model": model})
        np.testing.assert_array_equal(model.weight.detach().numpy(), floats(3, 4).array)


def test_output_has_no_trace_of_when_and_where(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, {"model.x": floats(5, 3), "model.flag": random_raw("BOOL", (3,))}, world=2)
        convert(tmp_path / name, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# --- boxes ------------------------------------------------------------------------------------------------------


def random_boxes(shape: tuple[int, ...], seed: int) -> list[Box]:
    """Boxes that tile a shape, by cutting at random: in general no grid."""
    choose = random.Random(seed)
    boxes = [((0,) * len(shape), shape)]
    for _ in range(choose.randrange(8)):
        offsets, sizes = boxes.pop(choose.randrange(len(boxes)))
        dim = choose.randrange(len(shape))
        cut = choose.randrange(sizes[dim] + 1)  # also at the ends: boxes of size zero are allowed
        low, high = list(sizes), list(sizes)
        low[dim], high[dim] = cut, sizes[dim] - cut
        moved = list(offsets)
        moved[dim] += cut
        boxes += [(offsets, tuple(low)), (tuple(moved), tuple(high))]
    choose.shuffle(boxes)
    return [(choose.randrange(3), offsets, sizes) for offsets, sizes in boxes]


@pytest.mark.parametrize("seed", range(60))
def test_any_tiling_by_boxes(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    shape = tuple(choose.randrange(1, 9) for _ in range(choose.randrange(1, 5)))
    raw = random_raw(choose.choice(["F32", "I16", "U8"]), shape, seed, boxes=random_boxes(shape, seed))
    save(tmp_path, {"model.x": raw}, world=3)
    source = plain.Folder(str(tmp_path))
    shards = plain.Shards(source, plain.read_checkpoint(source, plain.find_commit(source)))
    for elements in (1, 3, 1 << 20):
        blocks = [bytes(block) for block in shards.stream("model.x", elements)]
        assert b"".join(blocks) == raw.array.tobytes()
        assert max(map(len, blocks)) <= elements * raw.array.itemsize
    shards.close()


def test_buffers_are_filled_in_turn(tmp_path: Path) -> None:
    """Whoever lends them counts on it: what is read ahead must not come over what is still written."""
    save(tmp_path, {f"model.x{i}": floats(count, seed=i) for i, count in enumerate([8, 4, 6, 0, 4, 1])})
    source = plain.Folder(str(tmp_path))
    shards = plain.Shards(source, plain.read_checkpoint(source, plain.find_commit(source)))
    lent = [bytearray(16) for _ in range(3)]
    buffers = itertools.cycle(map(memoryview, lent))
    blocks = [block for i in range(6) for block in shards.stream(f"model.x{i}", 4, buffers)]
    numbers = {id(buffer): number for number, buffer in enumerate(lent)}
    assert [numbers[id(block.obj)] for block in blocks] == [0, 1, 2, 0, 1, 2, 0]
    shards.close()


PINWHEEL: list[Box] = [
    (0, (0, 0), (2, 3)), (1, (0, 3), (3, 2)), (0, (3, 2), (2, 3)), (1, (2, 0), (3, 2)), (1, (2, 2), (1, 1))
]  # fmt: skip


@pytest.mark.parametrize(
    "boxes",
    [
        PINWHEEL,
        [(r, (0, c), (5, 1)) for r, c in ((0, 0), (1, 1), (0, 2), (1, 3), (0, 4))],
        [(0, (0, 0), (5, 2)), (1, (0, 2), (5, 3))],
        [(0, (0, 0), (2, 2)), (1, (2, 0), (3, 2)), (0, (0, 2), (2, 3)), (1, (2, 2), (3, 3))],
    ],
    ids=["pinwheel", "columns", "two columns", "grid"],
)
def test_boxes_in_two_dims(tmp_path: Path, boxes: list[Box]) -> None:
    raw = floats(5, 5, boxes=boxes)
    save(tmp_path / "c", {"model.x": raw})
    convert(tmp_path / "c", tmp_path / "o.safetensors")
    assert read_safetensors(tmp_path / "o.safetensors")["x"] == as_fp32(raw)


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> plain.Chunk:
    return plain.Chunk("f", 0, math.prod(sizes), offsets, sizes, "")


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((2,), [box((0,), (2,)), box((0,), (2,))], "overlap"),
        ((2, 2), [box((0, 0), (2, 2)), box((1, 1), (1, 1))], "overlap"),
        ((), [box((), ()), box((), ())], "overlap"),
        ((3,), [box((1,), (2,))], "no chunk covers index 0 of dim 0"),
        ((3,), [box((0,), (2,))], "no chunk covers index 2 of dim 0"),
        ((3,), [box((0,), (1,)), box((2,), (1,))], "no chunk covers index 1 of dim 0"),
        ((2, 3), [box((0, 0), (2, 2)), box((1, 2), (1, 1))], "no chunk covers index 2 of dim 1"),
        ((2, 3), [box((0, 0), (1, 3)), box((1, 1), (1, 2))], "no chunk covers index 0 of dim 1"),
    ],
)
def test_what_is_no_tiling(shape: tuple[int, ...], boxes: list[plain.Chunk], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain.tile(shape, boxes, plain.Budget())


def test_a_shard_is_opened_once(tmp_path: Path) -> None:
    opened: list[str] = []

    class Counted(plain.Folder):
        def open_file(self, name: str) -> io.RawIOBase:
            opened.append(name.rpartition("/")[2])
            return super().open_file(name)

    save(tmp_path, {f"model.{i}": floats(9, seed=i) for i in range(20)}, world=3)
    source = Counted(str(tmp_path))
    shards = plain.Shards(source, plain.read_checkpoint(source, plain.find_commit(source)))
    for i in range(20):
        assert b"".join(shards.stream(f"model.{i}")) == floats(9, seed=i).array.tobytes()
    assert len(opened) == len(set(opened)) == 5  # the commit record, the manifest and three shards
    shards.close()
    assert not shards.files


def test_more_shards_than_files_are_kept_open(tmp_path: Path) -> None:
    world = plain.MAX_OPEN + 9
    raw = floats(4, world, boxes=[(rank, (0, rank), (4, 1)) for rank in range(world)])
    save(tmp_path / "c", {"model.x": raw}, world=world)
    convert(tmp_path / "c", tmp_path / "o.safetensors")
    assert read_safetensors(tmp_path / "o.safetensors")["x"] == as_fp32(raw)


# --- which checkpoint -------------------------------------------------------------------------------------------


def converted(path: Path) -> float:
    return float(np.frombuffer(read_safetensors(path)["x"][2], "<f4")[0])


def one(value: float) -> dict[str, Raw]:
    return {"model.x": Raw("F32", np.full(3, value, "<f4"))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 90, 100 and 120 (its second attempt), a folder of 130 without a commit, and a `latest` that lies."""
    root = tmp_path / "checkpoints"
    for step in (90, 100):
        save(root, one(step), step=step)
    save(root, one(-1), step=120, attempt=1, commit=False)
    save(root, one(120), step=120, attempt=2)
    save(root, one(-1), step=130, commit=False)
    (root / "latest").write_text("step-00000130")
    (root / "commits" / ".step-00000140.json.tmp").write_text("{")
    shutil.copy(SCRIPT, root / "zero_to_fp32.py")
    return root


def test_the_script_alone_in_its_folder(root: Path, tmp_path: Path) -> None:
    done = run_isolated(script=root / "zero_to_fp32.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert converted(root / "model.safetensors") == 120


def test_a_greater_step_wins_over_a_later_name(root: Path) -> None:
    save(root, one(7), step=121, tag="best")
    save(root, one(8), step=5, tag="zebra")
    convert(root)
    assert converted(root / "model.safetensors") == 7


@pytest.mark.parametrize(
    ("place", "more", "value"),
    [
        ("", ["--tag", "step-00000100"], 100),
        ("", ["-t", "step-00000100-a0001"], 100),
        ("step-00000100-a0001", [], 100),
        ("step-00000100-a0001/", [], 100),
        ("step-00000090", [], 90),
        ("step-00000120-a0002", [], 120),
    ],
)
def test_a_step_by_tag_or_by_folder(root: Path, place: str, more: list[str], value: float) -> None:
    convert(str(root) + "/" + place, *more)
    assert converted(root / "model.safetensors") == value


@pytest.mark.parametrize(
    ("place", "more", "words"),
    [
        ("", ["--tag", "step-00000130"], "step-00000090, step-00000100, step-00000120"),
        ("", ["--tag", "../commits"], "no committed checkpoint '../commits'"),
        ("step-00000120-a0001", [], "step-00000120 is in step-00000120-a0002"),
        ("step-00000130-a0001", [], "no committed checkpoint"),
        ("nowhere", [], "no committed checkpoint 'nowhere'"),
        ("nowhere/at/all", [], "no committed checkpoint in"),
        ("step-00000100-a0001", ["--tag", "step-00000090"], "omit --tag"),
        ("", ["--max-shard-size", "5 apples"], "is not a size"),
        ("", ["--max-shard-size", "0"], "is not a size"),
    ],
)
def test_wrong_arguments(root: Path, place: str, more: list[str], words: str) -> None:
    assert words in refuse(2, root / place, *more)
    assert not list(root.glob("model*"))


def test_an_unknown_option_shows_the_usage(root: Path) -> None:
    done = run_isolated(root, "--to", "bf16")
    assert done.returncode == 2
    assert "usage: zero_to_fp32.py" in done.stderr
    assert "--max-shard-size" in run_script("--help").stdout


# --- the output -------------------------------------------------------------------------------------------------


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"model.layer.{i}.weight": floats(i + 1, 25, seed=i) for i in range(9)}
    save(tmp_path / "c", tensors, aliases={"model.tied": "model.layer.8.weight"})
    text = convert(tmp_path / "c", tmp_path / "out", "--max-shard-size", "1KB")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert names == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = {name[6:]: as_fp32(raw) for name, raw in tensors.items()}
    expected["tied"] = expected["layer.8.weight"]
    assert index["metadata"] == {"total_size": sum(len(data) for _, _, data in expected.values())}
    for shard in shards:
        found = read_safetensors(tmp_path / "out" / shard)
        assert sum(len(data) for _, _, data in found.values()) <= 1000
        assert {name: index["weight_map"][name] for name in found} == dict.fromkeys(found, shard)
        expected = {name: value for name, value in expected.items() if found.get(name) != value}
        assert shard in text
    assert not expected


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model.a": floats(50), "model.b": floats(2), "model.c": floats(99), "model.d": floats(2)})
    convert(tmp_path / "c", tmp_path / "out", "--max_shard_size=100")
    shards = sorted((tmp_path / "out").glob("model-*-of-00004.safetensors"))
    assert [list(read_safetensors(shard)) for shard in shards] == [["a"], ["b"], ["c"], ["d"]]


def test_tensors_are_aligned_in_the_file(tmp_path: Path) -> None:
    tensors = {"model.a": random_raw("BOOL", (3,)), "model.b": floats(3), "model.c": random_raw("I64", (1,))}
    save(tmp_path / "c", tensors)
    convert(tmp_path / "c", tmp_path / "o.safetensors")
    assert list(read_safetensors(tmp_path / "o.safetensors")) == ["c", "b", "a"]  # the reader checks the alignment


@pytest.mark.parametrize("first", ["5GB", "20B"])
@pytest.mark.parametrize("second", ["5GB", "12B"])
def test_overwrite_replaces_all_of_earlier_output(tmp_path: Path, first: str, second: str) -> None:
    save(tmp_path / "c", {"model.x": floats(3), "model.y": floats(5)}, step=1)
    save(tmp_path / "c", {"model.x": floats(3, seed=1), "model.z": floats(3)}, step=2)
    out = tmp_path / "out"
    convert(tmp_path / "c", out, "-t", "step-00000001", "--max-shard-size", first)
    (out / "model.safetensors.notes").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "--overwrite" in refuse(2, tmp_path / "c", out, "--max-shard-size", second)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    convert(tmp_path / "c", out, "--max-shard-size", second, "--overwrite")
    assert set(read_safetensors(out.glob("model*.safetensors"))) == {"x", "z"}
    assert (out / "model.safetensors.index.json").exists() == (second == "12B")
    assert (out / "model.safetensors.notes").exists()


def test_overwriting_that_stops_midway_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", {"model.x": floats(3), "model.y": floats(5)})
    source = plain.Folder(str(tmp_path / "c"))
    checkpoint = plain.read_checkpoint(source, plain.find_commit(source))
    plain.export(source, checkpoint, str(tmp_path / "out"), plain.Fp32(), 12)

    def fail(old: str, new: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        plain.export(source, checkpoint, str(tmp_path / "out"), plain.Fp32(), 12, True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    save(tmp_path / "c", one(1))
    out = tmp_path / "o.safetensors"
    out.write_text("precious")
    assert str(out) in refuse(2, tmp_path / "c", out)
    assert out.read_text() == "precious"
    convert(tmp_path / "c", out, "--overwrite")
    assert converted(out) == 1


@pytest.mark.parametrize("name", ["weights.txt", "c/step-00000120-a0001", "c/step-00000120-a0001/w.safetensors"])
def test_places_that_are_no_output(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c", one(1))
    (tmp_path / "weights.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    refuse(2, tmp_path / "c", tmp_path / name, "--overwrite")
    assert sorted(tmp_path.rglob("*")) == before


def test_only_weights_are_wanted(tmp_path: Path) -> None:
    save(tmp_path / "c", {"optimizer.x.exp_avg": floats(3, role="optimizer")})
    assert "no parameters" in refuse(2, tmp_path / "c", tmp_path / "out")


def test_no_space_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model.x": floats(1 << 20)})
    done = subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT, tmp_path / "c", tmp_path / "out"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert os.strerror(errno.EFBIG) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


# --- damage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A step's folder with two tensors on two ranks."""
    return save(tmp_path / "c", {"model.w": floats(5, 4), "model.b": floats(3, role="buffer")})


def damaged(folder: Path) -> str:
    """The message about a damaged checkpoint; nothing may have been written."""
    out = folder.parent.parent / "out"
    message = refuse(1, folder.parent, out)
    assert not out.exists() or not list(out.iterdir())
    return message


def test_any_flipped_bit_of_a_tensor_is_found(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    for name, tensor in manifest["tensors"].items():
        for chunk in tensor["chunks"]:
            path = saved / chunk["file"]
            whole = path.read_bytes()
            for offset in (chunk["start"], chunk["start"] + chunk["length"] - 1):
                path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 16]) + whole[offset + 1 :])
                message = damaged(saved)
                for word in (str(path), repr(name), f"at {chunk['start']},", str(chunk["offsets"]), "sha256"):
                    assert word in message
            path.write_bytes(whole)


@pytest.mark.parametrize("change", [-1, -500, 1])
def test_a_shard_of_another_size(saved: Path, change: int) -> None:
    path = saved / "r00001-of-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, max(0, size + change))
    assert f"has {max(0, size + change)} bytes; the manifest says {size}" in damaged(saved)


def test_a_missing_shard(saved: Path) -> None:
    (saved / "r00001-of-00002.safetensors").unlink()
    assert "r00001-of-00002.safetensors is missing" in damaged(saved)


def test_swapped_shards(saved: Path) -> None:
    first, second = saved / "r00000-of-00002.safetensors", saved / "r00001-of-00002.safetensors"
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    damaged(saved)


def test_any_changed_byte_of_the_manifest(saved: Path) -> None:
    path = saved / "manifest.json"
    whole = path.read_bytes()
    source = plain.Folder(str(saved.parent))
    for offset in range(0, len(whole), 7):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(plain.Damaged, match="does not match the sha256"):
            plain.read_checkpoint(source, plain.find_commit(source))
    path.write_bytes(whole[:-1])
    assert "manifest.json does not match" in damaged(saved)
    path.unlink()
    assert "manifest.json is missing" in damaged(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"dir": "../c/step-00000120-a0001"}, {"dir": ".."}, {"dir": "."}, {"dir": "/etc"}, {"dir": "a\n"}, {"dir": 3},
        {"dir": ""}, {"dir": ".hidden"}, {"tag": "step-00000121"}, {"step": -1}, {"step": True}, {"step": "120"},
        {"manifest_sha256": ""}, {"manifest_sha256": 7},
        {"manifest_sha256": "0" * 63}, {"manifest_sha256": None}, {"format": "pickle"}, {"version": 2},
        {"version": None}, {"dir": "step-00000121-a0001"}, {"dir": "commits"}, {"dir": "step-00000120"}, {"step": 119},
        {"dir": "step-00000120-a0001-a0001"}, {"metrics": [1]}, {"metrics": {"loss": "low"}}, {"metrics": {"a": True}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_commit_records(saved: Path, changes: dict[str, Any]) -> None:
    commit_manifest(saved.parent, saved, TAG, 120, changes=changes)
    message = damaged(saved)
    assert ("commits/step" in message) == (changes != {"step": 119})


def test_a_key_given_twice(saved: Path) -> None:
    path = saved.parent / "commits" / f"{TAG}.json"
    path.write_text(path.read_text().replace('"step": 120', '"step": 120, "step": 120'))
    assert "it has a duplicate key" in damaged(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"tag": 1, "tag": 2}', "[" * 100_000, "\ud800"])
def test_commit_records_that_are_no_json(saved: Path, text: str) -> None:
    (saved.parent / "commits" / f"{TAG}.json").write_text(text, errors="surrogatepass")
    assert f"commits/{TAG}.json" in damaged(saved)


def _chunks(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = manifest["tensors"]["model.w"]["chunks"]
    return chunks


def _rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        files = manifest["files"]
        files[name] = files.pop("r00000-of-00002.safetensors")
        for tensor in manifest["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = chunk["file"].replace("r00000-of-00002.safetensors", name)

    return change


def _set(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = place.split("/")
        target: Any = manifest
        for part in path:
            target = target[int(part) if isinstance(target, list) else part]
        target[last] = value

    return change


CHUNK = "tensors/model.w/chunks/0"
MANIFESTS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    **{
        f"file {n!r}": ("not a valid file name and size", _rename_file(n))
        for n in ("../x", "a/b", "..", "/etc/passwd", "a\\b", "a\n", "", "a" * 256, "ä")
    },
    "file of no size": ("'size'", _set("files/r00000-of-00002.safetensors", {})),
    "file of size -1": ("not a valid file name and size", _set("files/r00000-of-00002.safetensors/size", -1)),
    "file as text": ("does not follow the format", _set("files", "r00000-of-00002.safetensors")),
    "no tensors": ("'tensors'", lambda m: m.pop("tensors")),
    "tensors as list": ("does not follow the format", _set("tensors", [])),
    "another tag": ("of another checkpoint", _set("tag", "step-00000119")),
    "another step": ("of another checkpoint", _set("step", 119)),
    "unknown dtype": ("or dtype 'F128'", _set("tensors/model.w/dtype", "F128")),
    "dtype as list": ("does not follow the format", _set("tensors/model.w/dtype", ["F32"])),
    "no role": ("'role'", lambda m: m["tensors"]["model.w"].pop("role")),
    "negative shape": ("non-negative integers", _set("tensors/model.w/shape", [-5, -4])),
    "shape of bools": ("non-negative integers", _set("tensors/model.w/shape", [True, 20])),
    "shape of floats": ("non-negative integers", _set("tensors/model.w/shape", [5.0, 4])),
    "huge shape": ("more or fewer", _set("tensors/model.w/shape", [1 << 62, 1 << 62])),
    "too many dims": ("non-negative integers", _set("tensors/model.w/shape", [1] * 65)),
    "fewer dims": ("is not inside shape [20]", _set("tensors/model.w/shape", [20])),
    "no chunks": ("more or fewer", _set("tensors/model.w/chunks", [])),
    "missing chunk": ("more or fewer", lambda m: _chunks(m).pop()),
    "chunk twice": ("more or fewer", lambda m: _chunks(m).append(_chunks(m)[0])),
    "overlap of the right volume": ("chunks overlap", lambda m: _chunks(m)[1].update(offsets=[2, 0])),
    "only the first chunk, twice": (
        "more or fewer",
        lambda m: _chunks(m).__setitem__(slice(None), [_chunks(m)[0]] * 2),
    ),
    "chunk outside": ("chunk [3, 0] of sizes [3, 4] is not inside shape [5, 4]", _set(f"{CHUNK}/offsets", [3, 0])),
    "chunk before": ("cannot have", _set(f"{CHUNK}/start", -8)),
    "chunk beyond the file": ("not inside a file", _set(f"{CHUNK}/start", 1 << 40)),
    "chunk too long": ("cannot have 52 bytes", _set(f"{CHUNK}/length", 52)),
    "length as float": ("cannot have 48.0 bytes", _set(f"{CHUNK}/length", 48.0)),
    "start as text": ("cannot have", _set(f"{CHUNK}/start", "8")),
    "unknown file": ("not inside a file", _set(f"{CHUNK}/file", "r00009-of-00002.safetensors")),
    "file as number": ("not inside a file", _set(f"{CHUNK}/file", 7)),
    "digest of wrong length": ("its sha256 is invalid", _set(f"{CHUNK}/sha256", "ab")),
    "digest as number": ("does not follow the format", _set(f"{CHUNK}/sha256", 7)),
    "digest of something else": ("do not match their sha256", _set(f"{CHUNK}/sha256", "0" * 64)),
    "alias to nowhere": ("an alias must be a new name", _set("aliases", {"model.v": "model.nowhere"})),
    "alias that is a tensor": ("an alias must be a new name", _set("aliases", {"model.w": "model.b"})),
    "alias to a list": ("does not follow the format", _set("aliases", {"model.v": ["model.b"]})),
    "aliases as list": ("does not follow the format", _set("aliases", ["model.v"])),
    "name of the header's own": (
        "'__metadata__'",
        lambda m: m["tensors"].update({"model.__metadata__": m["tensors"]["model.b"]}),
    ),
    "a size beyond 64 bits": ("not a valid file name and size", lambda m: m["files"].update({"x": {"size": 10**400}})),
    "two names that become one": (
        "duplicate or invalid name: 'w'",
        lambda m: m["tensors"].update({"w": m["tensors"]["model.b"]}),
    ),
}


@pytest.mark.parametrize(("words", "change"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_wrong_manifests(saved: Path, words: str, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    change(manifest)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    commit_manifest(saved.parent, saved, TAG, 120)
    assert words in damaged(saved)


@pytest.mark.full("1")
@pytest.mark.parametrize("scale", [4, 1])
def test_chunks_that_all_cut_one_another_are_refused(scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, each cut at a row of its own: every cut goes through all columns."""
    monkeypatch.setattr(plain, "LOOKS", plain.LOOKS // scale**2)

    def cut(count: int) -> list[Any]:
        boxes = [((0, column), (column + 1, 1)) for column in range(count)]
        boxes += [((column + 1, column), (count - column, 1)) for column in range(count)]
        return plain.tile((count + 1, count), [plain.Chunk("f", 0, 1, *box, "") for box in boxes], budget)

    budget = plain.Budget()
    assert len(cut(100 // scale)) == 100 // scale + 1
    with pytest.raises(ValueError, match="fragmented beyond the limit"):
        cut(1200 // scale)
    budget = plain.Budget()
    assert len(cut(600 // scale)) == 600 // scale + 1
    with pytest.raises(ValueError, match="fragmented beyond the limit"):  # the budget is one for all tensors
        cut(600 // scale)


def split(shape: tuple[int, int], rows: int, columns: int) -> dict[str, Any]:
    """A tensor of a manifest as `rows` times `columns` ranks save it."""
    height, width = shape[0] // rows, shape[1] // columns
    chunks = [
        {"file": "f", "start": 0, "length": 2 * height * width, "offsets": [r * height, c * width],
         "sizes": [height, width], "sha256": ""}
        for r in range(rows) for c in range(columns)
    ]  # fmt: skip
    return {"role": "parameter", "dtype": "BF16", "shape": list(shape), "chunks": chunks}


# The shapes in one of the 80 layers of a model with 70B parameters, without those of one dim.
LAYER = [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]


@pytest.mark.parametrize(("rows", "columns"), [(1024, 1), (128, 8), (256, 4), (16, 64)])
def test_a_model_of_70b_parameters_on_1024_ranks_is_within_the_budget(rows: int, columns: int) -> None:
    """One layer has a share of the budget; 80 layers, each with weights and two moments, have many."""
    budget = plain.Budget()
    for shape in LAYER:
        plain.parse_tensor(split(shape, rows, columns), {"f": 1 << 40}, budget)
    copies = 80 * 3
    assert plain.LOOKS + copies * (budget.looks - plain.LOOKS) >= 0
    assert plain.RUNS + copies * (budget.runs - plain.RUNS) >= 0
    text = json.dumps([split(shape, rows, columns) for shape in LAYER[:2]]).encode()
    weight = sum(text.count(sign) * weight for sign, weight in plain.DENSITY.items())
    assert weight <= plain.MEMORY_EACH * len(text)


def test_pieces_that_are_read_one_by_one_have_a_budget_for_the_whole_manifest(tmp_path: Path) -> None:
    """Columns of one byte: 300 tensors whose every element is a run of its own, of the same bytes of a small file."""
    folder = save(tmp_path / "c", {"model.x": Raw("U8", np.zeros((2, 2), "u1"))})
    manifest = json.loads((folder / "manifest.json").read_text())
    file = next(iter(manifest["files"]))
    os.truncate(folder / file, 1 << 16)
    manifest["files"][file]["size"] = 1 << 16
    chunks = [{"file": file, "start": 0, "length": 1 << 15, "offsets": [0, c], "sizes": [1 << 15, 1]} for c in range(2)]
    entry = {"role": "parameter", "dtype": "U8", "shape": [1 << 15, 2], "chunks": chunks}
    manifest["tensors"] = {f"model.{number}": entry for number in range(300)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    commit_manifest(folder.parent, folder, TAG, 120)
    assert "'tensors': their bytes are fragmented beyond the limit" in damaged(folder)


def test_small_values_that_would_fill_the_memory_are_refused_before_they_are_read(saved: Path) -> None:
    text = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(f'{{"x":[{{}}{",{}" * 8_000_000}],{text[1:]}')
    commit_manifest(saved.parent, saved, TAG, 120)
    assert "an implausible number of small values" in damaged(saved)


def test_chunks_without_digest_are_not_verified(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", one(3), digests=False)
    assert "1 tensors could not be verified: they were saved without sha256" in convert(
        tmp_path / "c", tmp_path / "out"
    )
    assert converted(tmp_path / "out" / "model.safetensors") == 3
    os.truncate(folder / "r00001-of-00002.safetensors", 4)
    assert "4 bytes" in refuse(1, tmp_path / "c", tmp_path / "again")


def test_chunks_of_size_zero_may_be_there_or_not(tmp_path: Path) -> None:
    boxes: list[Box] = [(0, (0,), (0,)), (1, (0,), (3,)), (0, (3,), (0,))]
    save(tmp_path / "c", {"model.x": floats(3, boxes=boxes), "model.e": Raw("F32", np.zeros((0, 2), "<f4"), boxes=[])})
    convert(tmp_path / "c", tmp_path / "o.safetensors")
    found = read_safetensors(tmp_path / "o.safetensors")
    assert found == {"x": as_fp32(floats(3)), "e": ("F32", (0, 2), b"")}


@pytest.mark.parametrize("count", [1 << 63, 10**4000, -1, True, 1.0])
def test_counts_beyond_64_bits_are_none(count: Any) -> None:
    assert plain.parse_counts([0, (1 << 63) - 1]) == (0, (1 << 63) - 1)
    with pytest.raises(ValueError, match="must be lists of non-negative integers"):
        plain.parse_counts([0, count])


def test_many_names_of_the_same_bytes_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_EXTRA", 0)
    names = {f"model.x{number}": "model.w" for number in range(70)}
    save(tmp_path / "c", {"model.w": floats(256, 64)}, aliases=names)
    source = plain.Folder(str(tmp_path / "c"))
    checkpoint = plain.read_checkpoint(source, plain.find_commit(source))
    with pytest.raises(plain.Damaged, match="tensors share bytes"):
        plain.export(source, checkpoint, str(tmp_path / "out"), plain.Fp32(), 1 << 30)
    assert not (tmp_path / "out").exists()


def test_links_may_not_leave_the_checkpoint(saved: Path) -> None:
    shard = saved / "r00000-of-00002.safetensors"
    inside = saved.parent / "kept.safetensors"
    shard.rename(inside)
    shard.symlink_to(inside)
    convert(saved.parent, saved.parent.parent / "linked")
    outside = saved.parent.parent / "outside.safetensors"
    inside.rename(outside)
    shard.unlink()
    shard.symlink_to(outside)
    assert str(outside) in damaged(saved)


def test_a_manifest_beyond_its_bound_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plain.Folder(str(saved.parent))
    record = plain.find_commit(source)
    size = (saved / "manifest.json").stat().st_size
    monkeypatch.setattr(plain, "MAX_MANIFEST", size - 1)
    with pytest.raises(plain.Damaged, match=f"larger than {size - 1} bytes"):
        plain.read_checkpoint(source, record)
    monkeypatch.setattr(plain, "MAX_MANIFEST", size)
    plain.read_checkpoint(source, record)


# --- size, interruption, other interpreters ---------------------------------------------------------------------


def peak_mib(*command: object) -> float:
    """The most memory that an interpreter had resident. (`ru_maxrss` of a child would start at its parent's.)"""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try:\n    sys.argv and runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print('peak', [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    arguments = [sys.executable, "-I", "-S", "-c", code, *map(str, command)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(done.stdout.rsplit("peak ", 1)[1]) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
@pytest.mark.full("F64", "BF16", "F16")
def test_memory_does_not_grow_with_the_model(tmp_path: Path, dtype: str) -> None:
    columns = 1000
    count = (600 if dtype in ("F32", "BF16") else 100) * 250_000 // columns  # rows, for 600 or 100 MB of output
    save_sparse(tmp_path / "c", dtype, (count, columns), rows((count, columns), 2))
    peak = peak_mib(SCRIPT, tmp_path / "c", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > count * columns * 4
    assert peak - peak_mib() < 64


@pytest.mark.slow
def test_memory_does_not_grow_with_columns_either(tmp_path: Path) -> None:
    boxes: list[Box] = [(0, (0, 0), (40_000, 1000)), (1, (0, 1000), (40_000, 1000))]
    save_sparse(tmp_path / "c", "F32", (40_000, 2000), boxes)
    assert peak_mib(SCRIPT, tmp_path / "c", tmp_path / "out") - peak_mib() < 64


def test_stopped_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    save_sparse(tmp_path / "c", "F16", (50_000, 1000), rows((50_000, 1000), 2))
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-I", "-S", SCRIPT, tmp_path / "c", out]) as process:
        deadline = time.monotonic() + 60
        while not (out.exists() and any(path.stat().st_size for path in out.iterdir())):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not (out / "model.safetensors").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not list(out.iterdir())


def find_interpreters() -> list[str]:
    """Every Python on this machine, this one included."""
    found = [shutil.which(f"python3.{minor}") for minor in range(8, 15)]
    works = [path for path in found if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode]
    return [sys.executable, *works]


def test_every_interpreter_writes_the_same_bytes(root: Path) -> None:
    save(root, {"model.h": random_raw("F16", (50,)), "model.b": random_raw("BF16", (50,)), **one(200)}, step=200)
    convert(root, root.parent / "ours.safetensors")
    ours = (root.parent / "ours.safetensors").read_bytes()
    for interpreter in find_interpreters():
        subprocess.run([interpreter, "-I", "-S", root / "zero_to_fp32.py"], check=True)
        assert (root / "model.safetensors").read_bytes() == ours, interpreter
        (root / "model.safetensors").unlink()
