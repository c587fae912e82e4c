"""A reader written from docs/explanation/checkpoint-format.md alone reads what two ranks have saved."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from engines import build_net, make_engine, train_engine, whole_state
from plain_checkpoint import commit_manifest
from ranks import run_ranks

from dsjob.checkpoint.offline.convert import convert
from dsjob.checkpoint.offline.verify import verify
from dsjob.ranks.mesh import World

# --- the reader ---

NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,255}")
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8, "BOOL": 1}
SIZES |= {f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (64, 32, 16, 8)}


def parse(data: bytes, limit: int) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    assert len(data) <= limit
    found = json.loads(data, object_pairs_hook=unique)
    assert (found["format"], found["version"]) == ("dsjob-checkpoint", 1)
    return found


def read_newest(root: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the bytes of every tensor in row-major order."""
    records = []
    for path in (root / "commits").iterdir():
        if path.suffix == ".json" and NAME.fullmatch(path.stem):
            record = parse(path.read_bytes(), 1 << 20)
            assert record["tag"] == path.stem
            records.append(record)
    record = max(records, key=lambda record: (record["step"], record["tag"]))
    assert NAME.fullmatch(record["dir"])
    text = (root / record["dir"] / "manifest.json").read_bytes()
    assert hashlib.sha256(text).hexdigest() == record["manifest_sha256"]
    manifest = parse(text, 256 << 20)
    assert (manifest["tag"], manifest["step"]) == (record["tag"], record["step"])
    for name, entry in manifest["files"].items():
        assert NAME.fullmatch(name)
        assert (root / record["dir"] / name).stat().st_size == entry["size"]
    return manifest, {name: read_tensor(root / record["dir"], t, manifest) for name, t in manifest["tensors"].items()}


def read_tensor(folder: Path, tensor: dict[str, Any], manifest: dict[str, Any]) -> bytes:
    width, shape = SIZES[tensor["dtype"]], tensor["shape"]
    whole, filled = bytearray(math.prod(shape) * width), [False] * math.prod(shape)
    for chunk in tensor["chunks"]:
        sizes, offsets = chunk["sizes"], chunk["offsets"]
        assert all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
        assert chunk["start"] + chunk["length"] <= manifest["files"][chunk["file"]]["size"]
        assert chunk["length"] == math.prod(sizes) * width
        with open(folder / chunk["file"], "rb") as file:
            file.seek(chunk["start"])
            data = file.read(chunk["length"])
        assert hashlib.sha256(data).hexdigest() == chunk["sha256"]
        for number, place in enumerate(itertools.product(*map(range, sizes))):
            index = 0
            for i, o, n in zip(place, offsets, shape, strict=True):
                index = index * n + i + o
            assert not filled[index]
            filled[index] = True
            whole[index * width : (index + 1) * width] = data[number * width : (number + 1) * width]
    assert all(filled)
    return bytes(whole)


# --- its proof ---


def make_net() -> torch.nn.Module:
    net = build_net()
    net.head.weight = net.emb.weight  # type: ignore[assignment]
    net.blocks[0].requires_grad_(False)
    return net


def save(world: World, folder: str, stage: int) -> dict[str, torch.Tensor]:
    engine = make_engine(stage, net=make_net())
    train_engine(engine, 0, 2)
    engine.save_checkpoint(folder, tag=f"stage{stage}")
    return whole_state(engine)


def save_both(world: World, folder: str) -> list[dict[str, torch.Tensor]]:
    return [save(world, f"{folder}/{stage}", stage) for stage in (1, 3)]


def test_a_reader_from_the_document_alone(tmp_path: Path) -> None:
    states = run_ranks(save_both, 2, str(tmp_path))[0]
    for stage, expected in zip((1, 3), states, strict=True):
        manifest, found = read_newest(tmp_path / str(stage))
        assert (manifest["tag"], manifest["step"], manifest["world_size"]) == (f"stage{stage}", 2, 2)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name] == tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), name
        assert manifest["aliases"]
        assert set(manifest["aliases"].values()) <= found.keys()
        roles = {entry["role"] for entry in manifest["tensors"].values()}
        assert roles >= {"parameter", "frozen", "optimizer"}


def test_chunks_of_no_elements_may_be_there(tmp_path: Path) -> None:
    engine = make_engine(0)
    train_engine(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="one")
    (path,) = tmp_path.glob("one-a*/manifest.json")
    manifest = json.loads(path.read_text())
    for tensor in manifest["tensors"].values():
        first = tensor["chunks"][0]
        if tensor["shape"]:
            nothing = {"sizes": [0 for _ in tensor["shape"]], "length": 0, "sha256": hashlib.sha256().hexdigest()}
            tensor["chunks"].insert(0, {**first, **nothing})
    path.write_text(json.dumps(manifest))
    commit_manifest(tmp_path, path.parent, "one", 1)
    other = make_engine(0)
    other.load_checkpoint(str(tmp_path))
    expected = whole_state(engine)
    for name, tensor in whole_state(other).items():
        assert torch.equal(tensor, expected[name]), name
    assert not verify(str(tmp_path))[0].damages
    convert(str(tmp_path), str(tmp_path / "w.safetensors"), to="fp32")
