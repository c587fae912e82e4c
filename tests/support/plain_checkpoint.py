"""A small writer of checkpoints for tests, made from the description of the format alone, and a safetensors reader.

Tensors are given as `Raw`: a dtype's name and an array whose items have its width (BF16 as uint16, and so on).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import signal
import subprocess
import traceback
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsjob.checkpoint.format import zero_to_fp32 as plain

STORED = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # rank, offsets, sizes


class Raw(NamedTuple):
    """A tensor to save; `boxes` says which rank has which part (by default uneven parts of dim 0)."""

    dtype: str
    array: np.ndarray[Any, Any]
    role: str = "parameter"
    boxes: list[Box] | None = None


def random_raw(dtype: str, shape: tuple[int, ...], seed: int = 0, **more: Any) -> Raw:
    """Random bits of a dtype (random truth values for BOOL)."""
    random = np.random.default_rng(seed)
    width = np.dtype(STORED[dtype]).itemsize
    data = random.integers(0, 2 if dtype == "BOOL" else 256, math.prod(shape) * width, dtype=np.uint8)
    return Raw(dtype, data.view(STORED[dtype]).reshape(shape), **more)


def floats(*shape: int, seed: int = 0, **more: Any) -> Raw:
    """Normal F32 values."""
    return Raw("F32", np.random.default_rng(seed).standard_normal(shape).astype("<f4"), **more)


def rows(shape: tuple[int, ...], world: int) -> list[Box]:
    """The split of dim 0 that FSDP makes: parts of ceil(n / world), the last ones smaller or left out."""
    if not shape:
        return [(0, (), ())]
    part = max(1, -(-shape[0] // world))
    starts = range(0, shape[0], part)
    rest = shape[1:]
    return [(rank, (s, *(0,) * len(rest)), (min(part, shape[0] - s), *rest)) for rank, s in enumerate(starts)]


def save(
    root: Path,
    tensors: dict[str, Raw],
    *,
    world: int = 2,
    step: int = 120,
    attempt: int = 1,
    tag: str | None = None,
    aliases: dict[str, str] | None = None,
    digests: bool = True,
    commit: bool = True,
) -> Path:
    """Writes a checkpoint below `root`; the path of its folder."""
    tag = tag or f"step-{step:08d}"
    folder = root / f"{tag}-a{attempt:04d}"
    folder.mkdir(parents=True)
    parts: dict[int, list[tuple[str, Box, bytes]]] = {rank: [] for rank in range(world)}
    for name, raw in tensors.items():
        for box in rows(raw.array.shape, world) if raw.boxes is None else raw.boxes:
            cut = raw.array[tuple(slice(o, o + n) for o, n in zip(box[1], box[2], strict=True))]
            parts[box[0]].append((name, box, np.ascontiguousarray(cut).tobytes()))
    entries: dict[str, Any] = {
        name: {"role": raw.role, "dtype": raw.dtype, "shape": list(raw.array.shape), "chunks": []}
        for name, raw in tensors.items()
    }
    files = {}
    for rank, saved in parts.items():
        file = f"r{rank:05d}-of-{world:05d}.safetensors"
        position, header = 0, {}
        for name, (_, offsets, sizes), data in saved:
            key = f"{name}@{','.join(map(str, offsets))}"
            span = [position, position + len(data)]
            header[key] = {"dtype": entries[name]["dtype"], "shape": sizes, "data_offsets": span}
            position += len(data)
        text = json.dumps(header).encode()
        start = 8 + len(text)
        for name, (_, offsets, sizes), data in saved:
            chunk = {"file": file, "start": start, "length": len(data), "offsets": offsets, "sizes": sizes}
            chunk["sha256"] = hashlib.sha256(data).hexdigest() if digests else ""
            entries[name]["chunks"].append(chunk)
            start += len(data)
        body = b"".join(data for _, _, data in saved)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + body)
        files[file] = {"size": start}
    manifest = {
        "format": "dsjob-checkpoint", "version": 1, "tag": tag, "step": step, "world_size": world, "zero_stage": 3,
        "files": files, "tensors": entries, "aliases": aliases or {},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if commit:
        commit_manifest(root, folder, tag, step, attempt)
    return folder


def commit_manifest(root: Path, folder: Path, tag: str, step: int, attempt: int = 1, changes: Any = None) -> None:
    """(Re)writes the commit record for the manifest as it is now, with changes to the record's keys."""
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    record = {
        "format": "dsjob-checkpoint", "version": 1, "tag": tag, "step": step, "attempt": attempt, "dir": folder.name,
        "manifest_sha256": digest, **(changes or {}),
    }  # fmt: skip
    path = root / "commits" / f"{tag}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))
    (root / "latest").write_text(tag)


def save_sparse(root: Path, dtype: str, shape: tuple[int, int], boxes: list[Box]) -> int:
    """A checkpoint of one tensor of zeros that takes no room on the disk; the bytes of the tensor."""
    folder = save(root, {"model.x": Raw(dtype, np.zeros((2, 2), STORED[dtype]))}, digests=False)
    manifest = json.loads((folder / "manifest.json").read_text())
    width = np.dtype(STORED[dtype]).itemsize
    chunks, ends = [], {}
    for rank, offsets, sizes in boxes:
        file = f"r{rank:05d}-of-00002.safetensors"
        start, length = ends.get(file, 1000), math.prod(sizes) * width
        chunks.append({"file": file, "start": start, "length": length, "offsets": offsets, "sizes": sizes})
        ends[file] = start + length
    for file, end in ends.items():
        os.truncate(folder / file, end)
        manifest["files"][file] = {"size": end}
    manifest["tensors"]["model.x"].update(shape=shape, chunks=chunks)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    commit_manifest(root, folder, "step-00000120", 120)
    return math.prod(shape) * width


def read_safetensors(paths: Path | Iterable[Path]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of safetensors files, checked to be without holes and aligned."""
    found = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert length % 8 == 0
        end = 0
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            assert begin == end
            assert begin % np.dtype(STORED[entry["dtype"]]).itemsize == 0
            found[name] = entry["dtype"], tuple(entry["shape"]), data[8 + length + begin : 8 + length + stop]
            end = stop
        assert 8 + length + end == len(data)
    return found


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs zero_to_fp32.py with these arguments in this process."""
    words, before = list(map(str, arguments)), signal.getsignal(signal.SIGTERM)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            code: Any = plain.main(words)
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())
