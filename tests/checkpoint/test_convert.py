"""`dsjob convert` below the command line: sources by URL, dtypes by numpy, the project's errors."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from plain_checkpoint import STORED, Raw, floats, random_raw, read_safetensors, rows, run_script, save, save_sparse
from safetensors.torch import load_file

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.offline.convert import Written, convert, parse_size
from dsjob.errors import CorruptCheckpointError, NoCheckpointError, StorageError, UsageError

TENSORS = {
    "model.w": floats(40, 30),
    "model.b": random_raw("BF16", (7,), 1),
    "model.h": random_raw("F16", (9, 3), 2),
    "model.d": random_raw("F64", (5,), 3),
    "model.n": random_raw("I64", (), 4, role="buffer"),
    "model.flags": random_raw("BOOL", (6,), 5, role="buffer"),
    "model.f8": random_raw("F8_E4M3", (4,), 6),
    "model.complex": floats(3, 2)._replace(dtype="C64", array=floats(3, 4).array.view("<c8")),
    "optimizer.w.exp_avg": floats(40, 30, role="optimizer"),
}


def upload(folder: Path) -> str:
    """Copies a folder into fsspec's memory; its URL."""
    url = f"memory://{uuid.uuid4().hex}/run"
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{url}/{path.relative_to(folder)}", path.read_bytes())
    return url


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with steps 100 and 120."""
    save(tmp_path / "run" / "checkpoints", {"model.w": floats(2)}, step=100)
    save(tmp_path / "run" / "checkpoints", TENSORS, step=120, world=3, aliases={"model.tied": "model.w"})
    return tmp_path / "run"


@pytest.fixture(params=["local", "file", "memory"])
def place(run: Path, request: pytest.FixtureRequest) -> str:
    """The run's folder, as a path or a URL."""
    if request.param == "memory":
        return upload(run)
    return f"file://{run}" if request.param == "file" else str(run)


def by_torch(raw: Raw, to: torch.dtype) -> bytes:
    """A floating tensor as torch converts it."""
    bits = torch.from_numpy(raw.array.view({8: "<i8", 4: "<i4", 2: "<i2"}[raw.array.itemsize]).copy())
    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return bits.view(names[raw.dtype]).to(to).contiguous().view(torch.uint8).numpy().tobytes()


# --- sources ---


@pytest.mark.parametrize("below", ["", "/checkpoints", "/checkpoints/step-00000120-a0001", "/checkpoints/"])
def test_every_place_gives_what_the_script_gives(place: str, below: str, run: Path, tmp_path: Path) -> None:
    written = convert(place + below, str(tmp_path / "out"), to="fp32")
    assert run_script(run / "checkpoints", tmp_path / "script").returncode == 0
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("out", "script"))
    assert ours.read_bytes() == theirs.read_bytes()
    digest = hashlib.sha256(ours.read_bytes()).hexdigest()
    assert written == [
        Written(str(ours), ours.stat().st_size, digest, len(TENSORS))
    ]  # the moment is left out, the tied name added


def test_a_tag(place: str, tmp_path: Path) -> None:
    convert(place, str(tmp_path / "o.safetensors"), to="fp32", tag="step-00000100")
    assert set(read_safetensors(tmp_path / "o.safetensors")) == {"w"}


def test_by_default_beside_a_local_checkpoint(run: Path) -> None:
    root = run / "checkpoints"
    for to in ("fp32", "bf16"):  # one stands in the way of no other, nor of the script, which writes to the root itself
        path = convert(str(run), None, to=to)[0].path
        assert path == str(root / f"weights-step-00000120-{to}" / "model.safetensors")
    assert run_script(root).returncode == 0
    assert convert(str(run), None, to="fp32", tag="step-00000100")[0].tensors == 1
    with pytest.raises(UsageError, match="already contains converted weights"):
        convert(str(run), None, to="fp32")
    with pytest.raises(UsageError, match="the output needs a name"):
        convert(upload(run), None, to="fp32")


def test_output_at_a_url(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write weights to memory://x"):
        convert(str(run), "memory://x", to="fp32")
    convert(str(run), f"file://{tmp_path}/o.safetensors", to="fp32")
    assert (tmp_path / "o.safetensors").exists()


def test_urls_are_read_in_pieces_and_only_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"model.small.{i}": floats(3, 5, seed=i) for i in range(200)}
    tensors["model.large"] = floats(5 << 20)
    tensors["optimizer.large"] = floats(5 << 20, role="optimizer")
    save(tmp_path / "c", tensors, world=1)
    url, read = upload(tmp_path / "c"), storage.read_bytes
    pieces: list[int] = []

    def counted(url: str, start: int | None = None, end: int | None = None) -> bytes:
        data = read(url, start, end)
        pieces.append(len(data))
        return data

    monkeypatch.setattr(storage, "read_bytes", counted)
    convert(url, str(tmp_path / "out"), to="fp32")
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert found["large"][2] == tensors["model.large"].array.tobytes()
    assert found["small.199"][2] == tensors["model.small.199"].array.tobytes()
    assert max(pieces) <= 8 << 20
    assert len(pieces) < 20  # 200 small tensors in a few requests
    assert sum(pieces) < (20 << 20) + (3 << 20)  # the optimizer's 20 MiB are left alone


def test_columns_by_url(tmp_path: Path) -> None:
    raw = floats(300, 64, boxes=[(i % 2, (0, 16 * i), (300, 16)) for i in range(4)])
    save(tmp_path / "c", {"model.x": raw})
    convert(upload(tmp_path / "c"), str(tmp_path / "o.safetensors"), to="fp32")
    assert read_safetensors(tmp_path / "o.safetensors")["x"][2] == raw.array.tobytes()


# --- dtypes ---


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_floats_become_what_torch_makes_of_them(run: Path, tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    convert(str(run), str(tmp_path / "out"), to=to)  # type: ignore[arg-type]
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for name, raw in TENSORS.items():
        if raw.role == "optimizer":
            continue
        stored, shape, data = found[name[6:]]
        assert shape == raw.array.shape
        if raw.dtype in ("F64", "F32", "F16", "BF16"):
            assert loaded[name[6:]].dtype == dtype
            ours = loaded[name[6:]].reshape(-1)
            theirs = torch.frombuffer(bytearray(by_torch(raw, dtype)), dtype=dtype)
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours[~ours.isnan()], theirs[~ours.isnan()])
        else:
            assert (stored, data) == (raw.dtype, raw.array.tobytes())
    assert found["tied"] == found["w"]


def hard_values() -> Raw:
    """F32 with every upper half, and lower halves around the points where rounding turns."""
    upper = np.arange(1 << 16, dtype="<u4") << 16
    lower = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], "<u4"
    )
    return Raw("F32", (upper[:, None] | lower).view("<f4"))


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_of_hard_values(tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    raw = hard_values()
    save(tmp_path / "c", {"model.x": raw})
    convert(str(tmp_path / "c"), str(tmp_path / "out"), to=to)  # type: ignore[arg-type]
    found = np.frombuffer(read_safetensors(tmp_path / "out" / "model.safetensors")["x"][2], "<u2")
    expected = np.frombuffer(by_torch(raw, dtype), "<u2")
    nan = np.isnan(raw.array).reshape(-1)
    assert np.array_equal(found[~nan], expected[~nan])
    infinity = 0x7F80 if to == "bf16" else 0x7C00
    assert ((found[nan] & 0x7FFF) > infinity).all()
    assert np.array_equal(found[nan] >> 15, raw.array.view("<u4").reshape(-1)[nan] >> 31)


def test_a_dtype_that_is_kept_is_not_touched(tmp_path: Path) -> None:
    codes = np.arange(1 << 16, dtype="<u2")  # with every NaN
    save(tmp_path / "c", {"model.b": Raw("BF16", codes), "model.h": Raw("F16", codes.view("<f2"))})
    for to, name in (("bf16", "b"), ("fp16", "h")):
        convert(str(tmp_path / "c"), str(tmp_path / f"{to}.safetensors"), to=to)  # type: ignore[arg-type]
        assert read_safetensors(tmp_path / f"{to}.safetensors")[name][2] == codes.tobytes()


def test_overflow_is_counted_by_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(
        tmp_path / "c",
        {
            "model.fine": Raw("F32", np.array([65504.0, -65519.9, np.inf, np.nan], "<f4")),
            "model.wide": Raw("F32", np.array([65520.0, -1e30, 1.0], "<f4")),
            "model.double": Raw("F64", np.array([1e300, 1.0], "<f8")),
            "model.brain": Raw("BF16", np.array([0x7F00], "<u2")),
        },
    )
    with caplog.at_level(logging.WARNING):
        convert(str(tmp_path / "c"), str(tmp_path / "16"), to="fp16")
    assert [record.getMessage() for record in caplog.records] == [
        "4 values exceed the range of fp16 and became infinite, in wide (2), brain (1), double (1)"
    ]
    caplog.clear()
    convert(str(tmp_path / "c"), str(tmp_path / "32"), to="fp32")
    assert "1 values exceed the range of fp32 and became infinite, in double (1)" in caplog.text
    caplog.clear()
    save(
        tmp_path / "d",
        {"model.edge": Raw("F32", np.array([0x7F7F8000, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F800000], "<u4").view("<f4"))},
    )
    convert(str(tmp_path / "d"), str(tmp_path / "b"), to="bf16")
    assert "2 values exceed the range of bf16 and became infinite, in edge (2)" in caplog.text


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("world", [1, 3])
def test_blocks_meet_without_a_seam(tmp_path: Path, dtype: str, world: int) -> None:
    count = plain.BUFFER // 8 + 12_345  # more than a block
    raw = Raw(dtype, floats(count).array.astype(STORED[dtype] if dtype != "BF16" else "<u2"))
    raw = raw._replace(boxes=rows((count,), world))
    save(tmp_path / "c", {"model.x": raw}, world=world)
    convert(str(tmp_path / "c"), str(tmp_path / "o.safetensors"), to="bf16")
    assert read_safetensors(tmp_path / "o.safetensors")["x"][2] == by_torch(raw, torch.bfloat16)


# --- progress, errors ---


def test_progress_goes_up_to_the_total(run: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = convert(
        str(run), str(tmp_path / "out"), to="bf16", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] < written[0].size
    assert {total for _, total in seen} == {seen[-1][1]}


def test_shards(place: str, tmp_path: Path) -> None:
    written = convert(place, str(tmp_path / "out"), to="fp16", max_shard_size=1000)
    assert [Path(file.path).name for file in written][-1] == "model.safetensors.index.json"
    assert sum(file.tensors for file in written) == len(TENSORS)
    assert len(written) > 3
    for file in written:
        assert hashlib.sha256(Path(file.path).read_bytes()).hexdigest() == file.sha256


def test_errors_have_the_projects_names(place: str, run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(NoCheckpointError, match="no committed checkpoint 'step-7'") as caught:
        convert(place, out, to="fp32", tag="step-7")
    assert caught.value.hint == "available: step-00000100, step-00000120"
    there = "no such folder: " if storage.is_local(place) else "no committed checkpoint in "
    with pytest.raises(NoCheckpointError, match=f"^{there}.*/nothing/here") as caught:
        convert(place + "/nothing/here", out, to="fp32")
    assert "name the folder of a run" in caught.value.hint
    assert not Path(out).exists()
    convert(place, out, to="fp32")
    with pytest.raises(UsageError, match="already contains converted weights"):
        convert(place, out, to="fp32")
    convert(place, out, to="bf16", overwrite=True)
    Path(tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        convert(place, str(tmp_path / "file" / "out"), to="fp32")


@pytest.fixture(params=["flipped", "missing", "short"])
def broken(run: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The run's folder, with a shard of its newest step damaged."""
    shard = run / "checkpoints" / "step-00000120-a0001" / "r00001-of-00003.safetensors"
    data = shard.read_bytes()
    if request.param == "missing":
        shard.unlink()
    else:
        start = 8 + int.from_bytes(data[:8], "little")
        flipped = data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :]
        shard.write_bytes(flipped if request.param == "flipped" else data[:-1])
    return run


@pytest.mark.parametrize("remote", [False, True])
def test_damage(broken: Path, tmp_path: Path, remote: bool) -> None:
    out = tmp_path / "out"
    with pytest.raises(CorruptCheckpointError, match=r"step-00000120-a0001/r00001-of-00003\.safetensors") as caught:
        convert(upload(broken) if remote else str(broken), str(out), to="bf16")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert not out.exists() or not list(out.iterdir())


def test_a_scheme_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nosuch"):
        convert("nosuch://bucket/run", str(tmp_path), to="fp32")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("2GiB", 1 << 31),
        ("1.5 kb", 1500),
        ("10", 10),
        ("7B", 7),
        ("1T", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 apples", "0", "0.1B", "5XB", "5GB5", "nan", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_torch_is_not_imported() -> None:
    code = "import sys, dsjob.checkpoint.offline.convert; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--to", "fp32"], ["--to", "bf16"], ["--to", "fp32", "--format", "torch"]], ids=str)
@pytest.mark.full("['--to', 'bf16']", "['--to', 'fp32', '--format', 'torch']")
def test_memory_does_not_grow_with_the_model(tmp_path: Path, given: list[str]) -> None:
    save_sparse(tmp_path / "c", "F32", (60_000, 1000), rows((60_000, 1000), 2))
    code = (
        "import sys, numpy, dsjob.cli.convert\nfrom dsjob.cli import main\n"
        "peak = lambda: int(next(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')))\n"
        "before = peak(); assert main(sys.argv[1:]) == 0; print('grown', peak() - before)"
    )
    command = [sys.executable, "-c", code, "convert", str(tmp_path / "c"), str(tmp_path / "out"), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) >= 120_000_000
    assert int(done.stdout.rsplit("grown ", 1)[1]) < 64 << 10  # KiB
