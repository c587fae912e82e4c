#!/usr/bin/env python3
"""Converts a dsjob checkpoint to plain fp32 weights: safetensors files, or files that `torch.load` reads.

    python zero_to_fp32.py                                 the newest step; output goes beside this script
    python zero_to_fp32.py checkpoints/ weights/           model.safetensors, or shards and an index
    python zero_to_fp32.py checkpoints/step-00000120-a0001 pytorch_model.bin
    python zero_to_fp32.py --best --ema checkpoints/ weights/

Standalone: it needs only Python 3.8 or later. Every checkpoint folder contains a copy. dsjob imports this module too:
all code that reads commit records and manifests, and streams tensors from shards, is here. Memory use is a few buffers
of 8 MiB, whatever the size of the model. Nothing in a checkpoint is trusted: names cannot point outside it, sizes are
checked before memory is allocated, and digests before the output gets its final name.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import signal
import stat
import struct
import sys
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TextIO, TypeVar, Union

Bytes = Union[bytes, memoryview]  # noqa: UP007 (it is evaluated, also by Python 3.8)
T = TypeVar("T")
FORMAT, VERSION = "dsjob-checkpoint", 1
# For fullmatch. No separator and no leading dot, so that no name points outside the root.
NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,255}")
DIGEST = re.compile(r"([0-9a-f]{64})?")
WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8, "BOOL": 1}  # bytes an element
WIDTH.update({"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1})
MAX_RECORD, MAX_MANIFEST, MAX_DIMS, MAX_OPEN, BUFFER = 1 << 20, 256 << 20, 64, 32, 8 << 20
DENSITY = {b"{": 64, b"[": 64, b":": 128, b",": 32}  # bytes of memory per object, list, key and value of parsed JSON
MEMORY, MEMORY_EACH = 256 << 20, 16  # limit for parsed JSON: bytes, plus this many per byte of its text
# Limits on the work that one manifest can cause. LOOKS: comparisons of chunks, plus LOOKS_EACH per chunk (a grid of
# ranks needs two or three). RUNS: contiguous runs of bytes to read, plus one per RUN_BYTES bytes of tensors (splitting
# columns over 8 ranks makes thousands).
LOOKS, LOOKS_EACH = 1 << 20, 64
RUNS, RUN_BYTES = 1 << 23, 256
MOST_EACH, MOST_EXTRA = 64, 64 << 20  # output limit: bytes per byte of shards, plus extra; only tied weights repeat
TORCH = (".bin", ".pt", ".pth", ".ckpt")  # files in the format of `torch.save`
OUTPUT = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
STORAGES = {"F64": "Double", "F32": "Float", "F16": "Half", "BF16": "BFloat16", "C64": "ComplexFloat", "BOOL": "Bool"}
STORAGES.update({"I64": "Long", "I32": "Int", "I16": "Short", "I8": "Char", "U8": "Byte"})
LATER = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16", "U32": "uint32", "U64": "uint64"}
AVERAGE = "ema"  # the key of averages of weights, which are stored like optimizer state
ROLES = ("parameter", "frozen", "buffer")  # the roles of a model's tensors; `frozen`: a parameter that is not trained
ELSEWHERE = "restore the checkpoint from a copy, or choose the tag of another step"


class Problem(Exception):  # noqa: N818
    """The base of all errors here: `message` says what is wrong and where, `hint` what to do."""

    exit_code = 2

    def __init__(self, message: str, hint: str = ELSEWHERE) -> None:
        super().__init__(f"{message} ({hint})")
        self.message, self.hint = message, hint


class Damaged(Problem):
    """The checkpoint does not contain what was saved."""

    exit_code = 1


class NothingThere(Problem):
    """There is no committed checkpoint, or none with this name."""


class Refused(Problem):
    """The arguments are invalid, or the output exists already."""


class Folder:
    """A checkpoint root in the local file system. dsjob subclasses it for URLs. Names are relative, with `/`."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def names(self, folder: str) -> list[str]:
        """The names in a folder of the root. Empty if the folder does not exist."""
        path = os.path.join(self.root, folder)
        return os.listdir(path) if os.path.isdir(path) else []

    def open_file(self, name: str) -> io.RawIOBase:
        """Opens a seekable file. Raises FileNotFoundError if it is missing, Damaged if a link points outside the root
        or it is not a regular file."""
        path = os.path.realpath(os.path.join(self.root, name))
        if os.path.commonpath([path, self.root]) != self.root:
            raise Damaged(
                f"{self.root}/{name} is a link to {path}, outside the checkpoint", "replace the link with the file"
            )
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer, for ever if there is none.
        file = io.FileIO(path, opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0)))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise Damaged(f"{self.root}/{name} is not a regular file")
        return file


class Chunk(NamedTuple):
    """A box of a tensor (`offsets` and `sizes` per dim, in global coordinates), and the bytes of a shard that hold it
    in row-major order."""

    file: str
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sha256: str


class Tensor(NamedTuple):
    """A tensor of a manifest. `nodes` is the order in which to read its chunks for row-major output: a list of
    (elements, chunk) or (repeats, nodes)."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    nodes: list[Any]


class Checkpoint(NamedTuple):
    """A committed checkpoint with a valid manifest. `folder` is its name in the root, `files` maps shards to sizes in
    bytes."""

    tag: str
    step: int
    folder: str
    files: dict[str, int]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    manifest: dict[str, Any]


class Entry(NamedTuple):
    """A tensor of the output. `source` is its name in the manifest; `size` is in bytes."""

    source: str
    dtype: str
    shape: tuple[int, ...]
    size: int


class Written(NamedTuple):
    """A file of the output: its size in bytes, and the number of its tensors."""

    path: str
    size: int
    sha256: str
    tensors: int


def read_exactly(file: io.RawIOBase, view: memoryview) -> bool:
    """Fills `view` from the file. False if the file ends too early."""
    while len(view):
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that raises ValueError for duplicate keys. JSON readers differ in which one they keep."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a duplicate key")
    return found


def is_dense(text: bytes | bytearray) -> bool:
    """Whether parsing a JSON text would need far more memory than the text itself: `[[[[...` takes 64 bytes each."""
    return sum(text.count(sign) * size for sign, size in DENSITY.items()) > MEMORY + MEMORY_EACH * len(text)


def read_object(source: Folder, name: str, limit: int, digest: str = "") -> dict[str, Any]:
    """Reads a JSON object of at most `limit` bytes, and verifies its sha256 if `digest` is given. Raises Damaged."""
    place = f"{source.root}/{name}"
    try:
        with source.open_file(name) as file:
            size = file.seek(0, os.SEEK_END)
            # Allocates nothing for a file that is too large.
            data = bytearray(size if size <= limit else 0)
            file.seek(0)
            if size > limit or not read_exactly(file, memoryview(data)):
                raise Damaged(f"{place} is truncated, or larger than {limit} bytes")
        # Nothing is parsed before its digest is checked.
        if digest and hashlib.sha256(data).hexdigest() != digest:
            raise Damaged(f"{place} does not match the sha256 in the commit record or manifest")
        if is_dense(data):
            raise Damaged(f"{place} contains an implausible number of small values, which would exhaust the memory")
        found = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise Damaged(f"{place} is missing") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{place} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{place} is not a JSON object")
    return found


def read_json(source: Folder, name: str, limit: int, digest: str = "") -> dict[str, Any]:
    """As read_object, and checks the format and its version."""
    found, place = read_object(source, name, limit, digest), f"{source.root}/{name}"
    if found.get("format") != FORMAT:
        raise Damaged(f'{place} has no "format": "{FORMAT}"')
    if found.get("version") != VERSION or not is_count(found["version"]):
        hint = "use the zero_to_fp32.py in the checkpoint folder, or a newer dsjob"
        raise Damaged(f"{place} has version {str(found.get('version'))[:20]}; this program reads {VERSION}", hint)
    return found


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # not isinstance: JSON's `true` would pass


def read_commit(source: Folder, tag: str) -> dict[str, Any]:
    """Reads and checks the commit record of a tag: {tag, step, attempt, dir, manifest_sha256}. Raises Damaged."""
    name = f"commits/{tag}.json"
    record = read_json(source, name, MAX_RECORD)
    folder, digest = record.get("dir"), record.get("manifest_sha256") or "none"
    if record.get("tag") != tag or not is_count(record.get("step")) or not DIGEST.fullmatch(str(digest)):
        raise Damaged(f"{source.root}/{name} belongs to another tag, or lacks a valid step or sha256")
    if not isinstance(folder, str) or not re.fullmatch(re.escape(tag) + r"-a[0-9]{4,}(\.[0-9]+)?", folder):
        raise Damaged(f"{source.root}/{name} names an invalid folder: {str(folder)[:80]!r}")
    metrics = record.get("metrics", {})
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise Damaged(f"{source.root}/{name} has invalid metrics: they must be numbers by name")
    return record


def list_tags(source: Folder) -> list[str]:
    """The tags of all committed checkpoints in a root, sorted."""
    return sorted(name[:-5] for name in source.names("commits") if NAME.fullmatch(name) and name.endswith(".json"))


def find_commit(source: Folder, wanted: str | None = None) -> dict[str, Any]:
    """The commit record of a tag or of a step's folder, by default of the greatest step. Raises NothingThere."""
    tags = set(list_tags(source))
    if not tags:
        place = f"no committed checkpoint in {source.root}"
        if source.names("attempts"):
            hint = "wait for the first save, or name another folder"
            raise NothingThere(f"{place}: no run has completed a save there", hint)
        raise NothingThere(place, "name the folder of a run, or the folder `checkpoints` in it")
    if wanted is None:
        # Tags such as step-00000120 contain their step, so their records need not be read: on an object store, each
        # would be a request.
        numbered = {tag for tag in tags if re.fullmatch(r"step-[0-9]{8,}", tag)}
        newest = sorted(numbered, key=lambda tag: int(tag[5:]))[-1:] + sorted(tags - numbered)
        return max((read_commit(source, tag) for tag in newest), key=lambda record: (record["step"], record["tag"]))
    # Accept a folder's name too: step-00000120-a0001 is the folder of tag step-00000120.
    tag = wanted if wanted in tags else re.sub(r"-a[0-9]+(\.[0-9]+)?$", "", wanted)
    if tag not in tags:
        known = ", ".join(sorted(tags)[-5:])
        raise NothingThere(f"no committed checkpoint {wanted[:80]!r} in {source.root}", f"available: {known}")
    record = read_commit(source, tag)
    if wanted not in (tag, record["dir"]):
        raise NothingThere(f"{source.root}/{wanted[:80]} was never committed", f"{tag} is in {record['dir']}")
    return record


def read_checkpoint(source: Folder, record: dict[str, Any]) -> Checkpoint:
    """Reads and checks the manifest that a commit record names."""
    name = f"{record['dir']}/manifest.json"
    manifest = read_json(source, name, MAX_MANIFEST, record["manifest_sha256"])
    place: Any = "tag, step"
    # `place` follows the part that is being checked, for the message below.
    try:
        if (manifest["tag"], manifest["step"]) != (record["tag"], record["step"]):
            raise ValueError("they are those of another checkpoint")
        files = {place: entry["size"] for place, entry in manifest["files"].items()}
        for place, size in files.items():
            if not NAME.fullmatch(place) or not is_count(size) or size >= 1 << 63:
                raise ValueError("not a valid file name and size")
        tensors: dict[str, Tensor] = {}
        budget = Budget()
        for place, entry in manifest["tensors"].items():
            tensors[place] = parse_tensor(entry, files, budget)
        place = "tensors"
        budget.require_runs()
        aliases: dict[str, str] = manifest.get("aliases", {})
        for place, target in aliases.items():
            if place in tensors or target not in tensors:
                raise ValueError("an alias must be a new name for an existing tensor")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = error if isinstance(error, ValueError) else f"it does not follow the format ({error!r})"
        raise Damaged(f"{source.root}/{name}: {str(place)[:200]!r}: {str(what)[:300]}") from None
    return Checkpoint(record["tag"], record["step"], record["dir"], files, tensors, aliases, manifest)


class Budget:
    """Limits the work for all chunks of a manifest together, in proportion to their number and bytes.

    Without it, a small hostile manifest could describe boxes so fragmented that reading them would never end.
    """

    def __init__(self) -> None:
        self.looks, self.runs = LOOKS, RUNS

    def add(self, chunks: int, length: int) -> None:
        """Grants the budget for a tensor with so many chunks and bytes."""
        self.looks += LOOKS_EACH * chunks
        self.runs += length // RUN_BYTES

    def look(self, boxes: int) -> None:
        """Counts comparisons of boxes. Raises ValueError beyond the limit."""
        self.looks -= boxes
        if self.looks < 0:
            raise ValueError("its chunks are fragmented beyond the limit of this reader")

    def require_runs(self) -> None:
        """Raises ValueError if there are more runs of bytes than the limit."""
        if self.runs < 0:
            raise ValueError("their bytes are fragmented beyond the limit of this reader")


def count_runs(nodes: list[Any]) -> int:
    """How many items `walk` yields: contiguous runs of bytes to read."""
    return sum(1 if isinstance(item, Chunk) else count * count_runs(item) for count, item in nodes)


def parse_tensor(entry: dict[str, Any], files: dict[str, int], budget: Budget) -> Tensor:
    """Parses and checks a tensor of a manifest. Raises ValueError, or KeyError, TypeError or AttributeError for a value
    of the wrong type."""
    role, dtype, shape = entry["role"], entry["dtype"], parse_counts(entry["shape"])
    if dtype not in WIDTH or type(role) is not str:
        raise ValueError(f"unknown role {str(role)[:80]!r} or dtype {str(dtype)[:80]!r}")
    chunks = []
    for item in entry["chunks"]:
        offsets, sizes = parse_counts(item["offsets"]), parse_counts(item["sizes"])
        chunk = Chunk(item["file"], item["start"], item["length"], offsets, sizes, item.get("sha256") or "")
        if not len(shape) == len(offsets) == len(sizes) or any(map(lambda o, s, n: o + s > n, offsets, sizes, shape)):
            raise ValueError(f"chunk {list(offsets)} of sizes {list(sizes)} is not inside shape {list(shape)}")
        counted = is_count(chunk.start) and is_count(chunk.length)
        if not counted or chunk.length != math.prod(sizes) * WIDTH[dtype]:
            raise ValueError(f"a chunk of sizes {list(sizes)} cannot have {chunk.length} bytes (at {list(offsets)})")
        if chunk.start + chunk.length > files.get(chunk.file, -1) or not DIGEST.fullmatch(chunk.sha256):
            raise ValueError(f"chunk {list(offsets)} is not inside a file of the checkpoint, or its sha256 is invalid")
        chunks.append(chunk)
    # Empty chunks cover nothing.
    filled = [chunk for chunk in chunks if chunk.length]
    # Together with `tile`, which rejects gaps and overlaps, this means that each element occurs exactly once.
    if sum(chunk.length for chunk in filled) != math.prod(shape) * WIDTH[dtype]:
        raise ValueError("its chunks have more or fewer elements than its shape")
    budget.add(len(chunks), math.prod(shape) * WIDTH[dtype])
    nodes = tile(shape, filled, budget) if filled else []
    budget.runs -= count_runs(nodes)
    return Tensor(role, dtype, shape, tuple(chunks), nodes)


def parse_counts(values: Any) -> tuple[int, ...]:
    if type(values) is not list or len(values) > MAX_DIMS or not all(is_count(n) and n < 1 << 63 for n in values):
        raise ValueError("shape, offsets and sizes must be lists of non-negative integers")
    return tuple(values)


def tile(shape: tuple[int, ...], chunks: list[Chunk], budget: Budget, dim: int = 0) -> list[Any]:
    """Plans the row-major walk over boxes (see Tensor.nodes). Raises ValueError unless they fill the tensor exactly.

    Cuts `dim` wherever a box begins or ends. Between two cuts, the set of boxes does not change. If a single box fills
    all later dims, its elements there are one contiguous run. Otherwise each index between the cuts repeats the same
    walk over the later dims.
    """
    if dim == len(shape):
        if len(chunks) > 1:
            raise ValueError("chunks overlap")
        return [(1, chunks[0])]
    ends = {chunk: chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks}
    cuts = sorted({0, shape[dim], *ends.values(), *(chunk.offsets[dim] for chunk in chunks)})
    # By first index, the smallest last, so that `pop` takes the next one.
    waiting = sorted(chunks, key=lambda chunk: -chunk.offsets[dim])
    active: list[Chunk] = []
    nodes: list[Any] = []
    for index, low in enumerate(cuts[:-1]):
        active = [chunk for chunk in active if ends[chunk] > low]
        while waiting and waiting[-1].offsets[dim] == low:
            active.append(waiting.pop())
        budget.look(len(active))
        if not active:
            raise ValueError(f"no chunk covers index {low} of dim {dim}")
        # `rest`: the shape of one row, all later dims.
        rows, rest = cuts[index + 1] - low, shape[dim + 1 :]
        whole = len(active) == 1 and active[0].sizes[dim + 1 :] == rest
        nodes.append((rows * math.prod(rest), active[0]) if whole else (rows, tile(shape, active, budget, dim + 1)))
    return nodes


def walk(nodes: list[Any]) -> Iterator[tuple[int, Chunk]]:
    """Yields (elements, chunk): how many elements to read next from which chunk, in row-major order of the tensor."""
    for count, item in nodes:
        if isinstance(item, Chunk):
            yield count, item
        else:
            for _ in range(count):
                yield from walk(item)


class Shards:
    """Reads the shards of a checkpoint. Opens files on demand, and keeps at most MAX_OPEN of them open."""

    def __init__(self, source: Folder, checkpoint: Checkpoint) -> None:
        self.source, self.checkpoint = source, checkpoint
        self.files: dict[str, io.RawIOBase] = {}

    def close(self) -> None:
        while self.files:
            self.files.popitem()[1].close()

    def open_file(self, name: str) -> io.RawIOBase:
        """Opens a shard. Raises Damaged if it is missing or does not have the size in the manifest."""
        file = self.files.pop(name, None)
        if file is None:
            path, size = f"{self.checkpoint.folder}/{name}", self.checkpoint.files[name]
            try:
                file = self.source.open_file(path)
            except FileNotFoundError:
                raise Damaged(f"{self.source.root}/{path} is missing") from None
            found = file.seek(0, os.SEEK_END)
            if found != size:
                file.close()
                raise Damaged(f"{self.source.root}/{path} has {found} bytes; the manifest says {size}")
            # Ranks may have saved thousands of shards, while a process may have about a thousand files open.
            if len(self.files) >= MAX_OPEN:
                self.files.pop(next(iter(self.files))).close()
        self.files[name] = file  # inserted last: the dict is in order of use, and its first file is closed first
        return file

    def read(self, name: str, chunk: Chunk, position: int, digest: Any, view: memoryview) -> None:
        """Fills `view` with bytes of a chunk of the tensor `name`, starting at `position`. Raises Damaged.

        Reads of one chunk must follow each other from its first byte to its last and share `digest`, a sha256 that is
        new at position 0. The read that ends the chunk verifies it.
        """
        file, end = self.open_file(chunk.file), position + len(view)
        file.seek(chunk.start + position)
        complete = read_exactly(file, view)
        if chunk.sha256 and complete:
            digest.update(view)
        if not complete or (chunk.sha256 and end == chunk.length and digest.hexdigest() != chunk.sha256):
            path = f"{self.source.root}/{self.checkpoint.folder}/{chunk.file}"
            what = "do not match their sha256" if complete else "are truncated"
            place = f"chunk {list(chunk.offsets)} of tensor {name[:200]!r}"
            raise Damaged(f"{path}: the {chunk.length} bytes at {chunk.start}, {place}, {what}")

    def stream(
        self, name: str, elements: int = BUFFER // 8, buffers: Iterator[memoryview] | None = None
    ) -> Iterator[memoryview]:
        """Yields the bytes of a tensor in row-major order, in blocks of `elements`.

        A block stays valid until the next but one. With `buffers` (each as large as a block), it stays valid until its
        buffer comes around again. Each chunk is read once, from its first byte to its last, and verified at its end, so
        do not trust any block before the last one. Raises Damaged.
        """
        tensor, fill, block = self.checkpoint.tensors[name], 0, memoryview(b"")
        width = WIDTH[tensor.dtype]
        size = min(elements, math.prod(tensor.shape)) * width
        # Two buffers in turn: the caller may still use the last block while the next one is filled.
        buffers = buffers or itertools.cycle((memoryview(bytearray(size)), memoryview(bytearray(size))))
        # Chunks read in part: the position reached, and the digest so far. Rows of side-by-side chunks alternate.
        reading: dict[Chunk, tuple[int, Any]] = {}
        for count, chunk in walk(tensor.nodes):
            position, digest = reading.pop(chunk, None) or (0, hashlib.sha256())
            end = position + count * width
            while position < end:
                block = block if fill else next(buffers)[:size]
                view = block[fill : fill + end - position]
                self.read(name, chunk, position, digest, view)
                fill, position = fill + len(view), position + len(view)
                if fill == len(block):
                    yield block
                    fill = 0
            # Side-by-side boxes (split columns) alternate row by row, so this one goes on later.
            if end < chunk.length:
                reading[chunk] = end, digest
        if fill:
            yield block[:fill]


class Fp32:
    """Converts F16, BF16 and F64 to F32 (F64 rounded, the others exactly) and keeps other dtypes."""

    def target(self, dtype: str) -> str:
        return "F32" if dtype in ("F64", "BF16", "F16") else dtype

    def __call__(self, name: str, dtype: str, block: memoryview) -> memoryview:
        """Converts the bytes of some elements of the tensor `name` to `target(dtype)`."""
        if dtype == "BF16":  # BF16 is the upper half of F32
            data, out = bytes(block), bytearray(2 * len(block))
            # Little-endian: two zero bytes, then the two bytes of the BF16 value.
            out[2::4], out[3::4] = data[0::2], data[1::2]
            return memoryview(out)
        if dtype == "F16":
            return memoryview(swap(array("I", map(half_bits().__getitem__, swap(array("H", bytes(block))))))).cast("B")
        if dtype == "F64":
            return memoryview(swap(array("f", swap(array("d", bytes(block)))))).cast("B")
        return block


def swap(values: array[Any]) -> array[Any]:
    """Swaps between the file's byte order (little-endian) and the machine's."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


@functools.lru_cache(maxsize=None)  # noqa: UP033 (`cache` came with Python 3.9)
def half_bits() -> list[int]:
    """The F32 bits of each F16 value. NaNs keep their sign and payload, which `struct` alone would lose."""
    # The 32,768 values without a sign bit. The sign is added at the end.
    values = struct.unpack("<32768e", struct.pack("<32768H", *range(1 << 15)))
    plus = list(struct.unpack("<32768I", struct.pack("<32768f", *values)))
    # 0x7C00 and up: infinity and NaNs. F16 has 10 bits of mantissa, F32 has 23, hence the shift by 13.
    plus[0x7C00:] = [0x7F800000 | mantissa << 13 for mantissa in range(1 << 10)]
    return plus + [1 << 31 | bits for bits in plus]


def weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Maps the model's own names of its parameters and buffers to names in the manifest, sorted. Tied tensors appear
    under each of their names."""
    names = {name: name for name, tensor in checkpoint.tensors.items() if tensor.role in ROLES}
    names.update({name: target for name, target in checkpoint.aliases.items() if target in names})
    found: dict[str, str] = {}
    for name, target in sorted(names.items()):
        short = name[6:] if name.startswith("model.") else name
        if short in found or short == "__metadata__" or not short.encode("utf-8", "ignore").decode() == short:
            raise Damaged(f"the manifest of {checkpoint.tag} has a duplicate or invalid name: {short[:80]!r}")
        found[short] = target
    if not found:
        raise NothingThere(f"{checkpoint.tag} has no parameters and no buffers", "choose another step with --tag")
    return found


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB", "2GiB" or "1000". Raises Refused for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = found and float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    if not size or size < 1:
        raise Refused(f"{text!r} is not a size", "write 5GB, 500MB or 2GiB")
    return int(size)


def without_frozen(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without its frozen parameters."""
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.role != "frozen"}
    aliases = {name: target for name, target in checkpoint.aliases.items() if target in kept}
    return checkpoint._replace(tensors=kept, aliases=aliases)


def averages(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The averages that `dsjob.callbacks.EMA` keeps, by the names of their weights."""
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("optimizer.") and name.endswith(f".{AVERAGE}"):
            found[f"model.{name[len('optimizer.') : -len(AVERAGE) - 1]}"] = tensor
    return found


def with_averages(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with averages in place of the weights that have one. Raises Refused if there are none."""
    found = averages(checkpoint)
    if not found:
        message = f"the checkpoint {checkpoint.tag} contains no averages of weights"
        raise Refused(message, "train with the callback dsjob.callbacks.EMA, or leave out --ema")
    tensors = {
        name: found[name]._replace(role=tensor.role) if name in found else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return checkpoint._replace(tensors=tensors)


def plan_files(out: str, form: str, entries: dict[str, Entry], limit: int, overwrite: bool) -> dict[str, list[str]]:
    """Which tensors go to which path. Raises Refused if the output exists or its name does not fit the format."""
    if out.endswith((".safetensors", *TORCH)):
        if form and (form == "torch") != out.endswith(TORCH):
            raise Refused(f"{out} does not have the extension of format {form}", "name a folder, or omit --format")
        taken, files = os.path.exists(out), {out: list(entries)}
    elif os.path.isfile(out):
        raise Refused(
            f"{out} is a file with an unknown extension",
            f"name a folder, or a file that ends in .safetensors, {', '.join(TORCH)}",
        )
    else:
        taken = os.path.isdir(out) and any(map(OUTPUT.fullmatch, os.listdir(out)))
        groups: list[list[str]] = [[]]
        # torch's files can share a tensor between two names, but only within one file: sorting by source puts the names
        # of a tensor next to each other, and only the first one counts.
        sources: set[str] = set()
        room = limit
        by_source = sorted(entries.items(), key=lambda item: item[1].source)
        for name, entry in by_source if form == "torch" else entries.items():
            size = 0 if form == "torch" and entry.source in sources else entry.size
            if groups[-1] and size > max(room, 0):
                groups.append([])
                room = limit
            sources.add(entry.source)
            groups[-1].append(name)
            room -= size
        first, last = ("pytorch_model", ".bin") if form == "torch" else ("model", ".safetensors")
        many = f"{first}-%05d-of-{len(groups):05d}{last}" if groups[1:] else f"{first}{last}%.0s"
        files = {os.path.join(out, many % number): group for number, group in enumerate(groups, 1)}
    if taken and not overwrite:
        raise Refused(
            f"{out} already contains converted weights",
            "choose another output, or set --overwrite (Python: overwrite=True)",
        )
    return files


def export(
    source: Folder,
    checkpoint: Checkpoint,
    out: str,
    cast: Fp32,
    limit: int,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    form: str = "",
    beside: dict[str, bytes] | None = None,
) -> list[Written]:
    """Writes the weights to a local folder or a single file. Leaves nothing behind if it fails.

    `limit`: bytes of tensors per file of a folder. `progress`: called with bytes done and bytes in total. `form`:
    safetensors or torch; by default what the file name says, and safetensors for a folder. `beside`: more files to put
    into the folder. Raises Problem.
    """
    entries = plan_entries(checkpoint, cast)
    files = plan_files(out, form, entries, limit, overwrite)
    pack = pack_torch if form == "torch" or out.endswith(TORCH) else pack_safetensors
    # By source: torch's format writes a tied tensor once, safetensors once for each name.
    once = {entry.source: entry.size for entry in entries.values()}
    total = sum(once.values() if pack is pack_torch else (entry.size for entry in entries.values()))
    # A hostile manifest could let a million tensors share the same few bytes, and fill the disk.
    shards = {chunk.file for place in once for chunk in checkpoint.tensors[place].chunks}
    if total > MOST_EACH * sum(checkpoint.files[file] for file in shards) + MOST_EXTRA:
        raise Damaged(f"the output would have {total} bytes, many times the size of the shards: tensors share bytes")
    folder = os.path.dirname(next(iter(files))) or "."
    if os.path.realpath(folder) == os.path.join(source.root, checkpoint.folder):
        raise Refused(f"{folder} is the folder of a step, which must not change", "choose another output")
    stream = Stream(Shards(source, checkpoint), entries, cast, lambda done: progress(done, total))
    contents: list[tuple[str, Iterator[Bytes], int]] = [
        (os.path.join(folder, name), iter([data]), 0) for name, data in (beside or {}).items()
    ]
    contents += [(path, pack({n: entries[n] for n in names}, stream.read), len(names)) for path, names in files.items()]
    # The index is the last file, so a folder with an index is complete.
    contents += [(*make_index(files, total), 0)] if len(files) > 1 else []
    temporary: dict[str, str] = {}
    try:
        stream.open_files()  # finds missing and truncated shards before anything is written
        os.makedirs(folder, exist_ok=True)
        written = [Written(path, *write_file(path, temporary, blocks), count) for path, blocks, count in contents]
        publish(folder, temporary, out in files)
    finally:
        stream.close()
        for path in temporary.values():
            if os.path.exists(path):
                os.unlink(path)
    return written


class Stream:
    """Produces the bytes of the output's tensors in a pipeline: one thread reads and verifies, a second one converts
    to the output's dtype, while the caller writes."""

    def __init__(self, shards: Shards, entries: dict[str, Entry], cast: Fp32, progress: Callable[[int], None]) -> None:
        self.shards, self.entries, self.cast, self.progress = shards, entries, cast, progress
        self.reader, self.caster, self.done = ThreadPoolExecutor(1), ThreadPoolExecutor(1), 0
        self.tensors = [shards.checkpoint.tensors[entry.source] for entry in entries.values()]
        largest = max(math.prod(tensor.shape) * WIDTH[tensor.dtype] for tensor in self.tensors)
        # One buffer each for the stages of the pipeline: reading, casting, writing, and hashing what was written.
        self.buffers = itertools.cycle([memoryview(bytearray(min(largest, BUFFER // 2))) for _ in range(4)])

    def open_files(self) -> None:
        for file in sorted({chunk.file for tensor in self.tensors for chunk in tensor.chunks}):
            self.shards.open_file(file)

    def read(self, names: Iterable[str]) -> Iterator[memoryview]:
        """Yields the converted bytes of the tensors in order. A block never contains bytes of two tensors."""
        found = ahead(self.reader, self.verified(names))
        for block in ahead(self.caster, (self.cast(name, dtype, block) for name, dtype, block in found)):
            yield block
            self.done += len(block)
            self.progress(self.done)

    def verified(self, names: Iterable[str]) -> Iterator[tuple[str, str, memoryview]]:
        for name in names:
            place = self.entries[name].source
            dtype = self.shards.checkpoint.tensors[place].dtype
            for block in self.shards.stream(place, min(BUFFER // 8, BUFFER // 2 // WIDTH[dtype]), self.buffers):
                yield name, dtype, block

    def close(self) -> None:
        self.caster.shutdown()
        self.reader.shutdown()
        self.shards.close()


def ahead(pool: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    """Yields the same items. The thread of `pool` produces the next one while the caller uses the current one."""
    # None marks the end: inside this generator, a StopIteration would become a RuntimeError.
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


def plan_entries(checkpoint: Checkpoint, cast: Fp32) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, place in weights(checkpoint).items():
        tensor = checkpoint.tensors[place]
        dtype = cast.target(tensor.dtype)
        entries[name] = Entry(place, dtype, tensor.shape, math.prod(tensor.shape) * WIDTH[dtype])
    return entries


def make_index(files: dict[str, list[str]], total: int) -> tuple[str, Iterator[Bytes]]:
    """The path and content of the index: the JSON file that says which tensor is in which file."""
    weight_map = {name: os.path.basename(path) for path, names in files.items() for name in names}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    path = re.sub(r"-\d{5}-of-\d{5}(\.\w+)$", r"\1.index.json", next(iter(files)))
    return path, iter([index.encode()])


def pack_safetensors(entries: dict[str, Entry], read: Callable[[Iterable[str]], Iterator[Bytes]]) -> Iterator[Bytes]:
    """The bytes of a safetensors file. The format cannot share data, so a tensor with two names is written twice."""
    names = sorted(entries, key=lambda name: (-WIDTH[entries[name].dtype], name))  # widest first keeps all aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        span = [end, end := end + entries[name].size]
        header[name] = {"dtype": entries[name].dtype, "shape": entries[name].shape, "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begins at a multiple of 8 bytes. The JSON header may end in spaces.
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from read(names)


class Pipe:
    """A file for zipfile to write to, from which the bytes are taken again. So a zip can be produced as a stream."""

    def __init__(self) -> None:
        self.blocks: list[Bytes] = []
        self.position = 0

    def write(self, data: Bytes) -> int:
        self.blocks.append(data)
        self.position += len(data)
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> list[Bytes]:
        taken, self.blocks = self.blocks, []
        return taken


def pack_torch(entries: dict[str, Entry], read: Callable[[Iterable[str]], Iterator[Bytes]]) -> Iterator[Bytes]:
    """The bytes of a file in the format of `torch.save`: an uncompressed zip with a pickle and the data of each tensor,
    aligned to 64 bytes. Tensors with the same source share their data."""
    pipe = Pipe()
    # Reversed, so that the first name of each source remains.
    unique = {entries[name].source: name for name in reversed(entries)}
    keys = {source: str(number) for number, source in enumerate(unique)}
    start = {"data.pkl": pickle_tensors(entries, keys), "byteorder": b"little", "version": b"3\n"}
    members: list[tuple[str, int, Iterable[Bytes]]] = [(name, len(data), [data]) for name, data in start.items()]
    # One stream for all members: the order of `unique` is the order in which data is written.
    coming = read(unique.values())
    for source, name in unique.items():
        members.append((f"data/{keys[source]}", entries[name].size, take(coming, entries[name].size)))
    with zipfile.ZipFile(pipe, "w") as archive:  # type: ignore[call-overload]
        for name, size, blocks in members:
            info, large = zipfile.ZipInfo(f"archive/{name}"), size >= 1 << 31
            info.file_size = size
            # Before the data come a header of 30 bytes, the name, 20 bytes if zip64, and the padding field: 4 bytes and
            # the padding itself.
            padding = -(pipe.position + 34 + len(info.filename) + 20 * large) % 64
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=large) as member:
                for block in blocks:
                    member.write(block)
                    yield from pipe.take()
    yield from pipe.take()


def take(blocks: Iterator[Bytes], size: int) -> Iterator[Bytes]:
    """Yields blocks until they add up to `size` bytes."""
    while size:
        block = next(blocks)
        size -= len(block)
        yield block


def pickle_tensors(entries: dict[str, Entry], keys: dict[str, str]) -> bytes:
    """The pickle of a dict of tensors, written opcode by opcode, so that it needs no torch. `torch.load` reads it with
    `weights_only=True`.

    Names with the same source refer to the same tensor object, as tied parameters do in a model.
    """

    def text(value: str) -> bytes:
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def number(value: int) -> bytes:
        # LONG1: the number of bytes, then a signed little-endian integer. One bit more than the value, for the sign.
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def found(module: str, name: str) -> bytes:
        return f"c{module}\n{name}\n".encode()

    def row(*items: bytes) -> bytes:
        return b"(" + b"".join(items) + b"t"

    # PROTO 2, an empty dict, MARK; names and tensors follow, and at the end SETITEMS and STOP.
    parts = [b"\x80\x02}("]
    places: dict[str, bytes] = {}  # in the pickle's memo, by source
    for name, (source, dtype, shape, size) in entries.items():
        if source in places:
            parts.append(text(name) + b"j" + places[source])
            continue
        old = dtype in STORAGES
        storage = found("torch", f"{STORAGES[dtype]}Storage") if old else found("torch.storage", "UntypedStorage")
        count = number(size // WIDTH[dtype] if old else size)
        # Strides in elements, row-major. A dim of size 0 counts as 1, as in torch.
        steps = [math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape))]
        # BINPERSID on ("storage", type, key, device, elements): torch.load finds the data by its key. Then the offset.
        value = row(text("storage"), storage, text(keys[source]), text("cpu"), count) + b"Q" + number(0)
        value += row(*map(number, shape)) + row(*map(number, steps))
        value += b"\x89" + found("collections", "OrderedDict") + b")R"
        made = found("torch._utils", "_rebuild_tensor_v2" if old else "_rebuild_tensor_v3")
        places[source] = struct.pack("<I", len(places))
        parts.append(text(name) + made + b"(" + value + (b"" if old else found("torch", LATER[dtype])) + b"tR")
        parts.append(b"r" + places[source])
    return b"".join([*parts, b"u."])


def write_file(path: str, temporary: dict[str, str], blocks: Iterator[Bytes]) -> tuple[int, str]:
    """Writes the content for `path` durably, under a temporary name beside it. Returns its size in bytes and sha256."""
    digest = hashlib.sha256()
    folder, name = os.path.split(path)
    hidden = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
    with open(hidden, "xb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        temporary[path] = hidden
        hashing, size = pool.submit(digest.update, b""), 0
        for block in blocks:
            # At most one block is being hashed. Its buffer is reused only after that.
            hashing.result()
            hashing = pool.submit(digest.update, block)  # in parallel with writing: both release the GIL
            write_all(file, block)
            start_writeback(file.fileno(), size, len(block))
            size += len(block)
        hashing.result()
        os.fsync(file.fileno())
        return size, digest.hexdigest()


def write_all(file: io.FileIO, block: Bytes) -> None:
    view = memoryview(block)
    while len(view):
        view = view[file.write(view) :]


def start_writeback(handle: int, start: int, length: int) -> None:
    """Makes the kernel start writing these bytes to disk at once, so that the final fsync has little left to do."""
    if sys.platform == "linux":  # on other systems, the hint does not start writing
        os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)


def publish(folder: str, temporary: dict[str, str], alone: bool) -> None:
    """Gives the files their final names, the index last.

    First deletes earlier output in the same format, unless `alone` (the user named a single file). Output in the other
    format stays: it may be the only copy of something else.
    """
    names = {os.path.basename(path) for path in temporary}
    forms = [found.group(1, 3) for found in map(OUTPUT.fullmatch, names) if found]
    for found in filter(None, map(OUTPUT.fullmatch, [] if alone else sorted(os.listdir(folder), reverse=True))):
        name = found.group()
        # Files that are about to be replaced stay until then. An old index goes first: it would name deleted files.
        if found.group(1, 3) in forms and (name not in names or name.endswith(".json")):
            os.unlink(os.path.join(folder, name))
    for path, hidden in temporary.items():
        os.replace(hidden, path)
    if os.name == "posix":  # the new names are durable only after an fsync of the folder
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def locate(place: Folder, parent: Folder, name: str, tag: str | None) -> tuple[Folder, dict[str, Any]]:
    """The root and the commit record for `place`, which is a root, or the folder `name` of one step in `parent`."""
    if place.names("commits") or not parent.names("commits"):
        return place, find_commit(place, tag)
    if tag:
        raise Refused(f"{place.root} is already the folder of one step", "omit --tag, or name its parent folder")
    return parent, find_commit(parent, name)


def read_best(place: Folder) -> str:
    """The tag in the file `best`, which runs with `checkpoint.best` keep up to date."""
    try:
        with place.open_file("best") as file:
            return (file.read(256) or b"").decode(errors="replace").strip()
    except FileNotFoundError:
        hint = "choose a checkpoint with --tag; a run with checkpoint.best writes the file"
        raise NothingThere(f"{place.root} has no file `best`", hint) from None


def say(text: str, file: TextIO | None = None) -> None:
    """Prints a line, with escapes in place of characters that a terminal would obey: names can come from anyone."""
    print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), file=file)


def report(checkpoint: Checkpoint, written: list[Written]) -> None:
    parameters = sum(math.prod(t.shape) for t in checkpoint.tensors.values() if t.role in ROLES[:2])
    entries = weights(checkpoint)
    say(f"{checkpoint.tag}, step {checkpoint.step}: {len(entries)} tensors, {parameters:,} parameters, fp32")
    unchecked = sum(not all(chunk.sha256 for chunk in checkpoint.tensors[entry].chunks) for entry in entries.values())
    if unchecked:
        say(f"{unchecked} tensors could not be verified: they were saved without sha256")
    for path, size, digest, count in written:
        say(f"{path}  {size:,} bytes  {count} tensors  sha256 {digest}")
    files = [path for path, _, _, count in written if count]
    torch = files[0].endswith(TORCH)
    say("load with: from glob import glob; " + ("import torch" if torch else "from safetensors.torch import load_file"))
    load = "torch.load({}, weights_only=True)" if torch else "load_file({})"
    shards = re.sub(r"\d{5}-of-\d{5}", "*", files[0])
    state = f"{{k: v for file in glob({shards!r}) for k, v in {load.format('file')}.items()}}"
    say(f"           model.load_state_dict({state if files[1:] else load.format(repr(files[0]))})")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Exit codes: 0 done, 1 damage or a system error, 2 invalid arguments or no checkpoint."""
    parser = argparse.ArgumentParser(
        description="Converts a dsjob checkpoint to fp32 weights: safetensors, or files that torch.load reads.",
        epilog="Also accepts DeepSpeed's arguments, old (zero_to_fp32.py CKPT_DIR pytorch_model.bin) and new.",
    )
    here = os.path.dirname(os.path.abspath(__file__))
    place_help = "checkpoint folder, or the folder of one step (default: where this script is)"
    parser.add_argument("checkpoint_dir", nargs="?", default=here, help=place_help)
    files = f"a folder, or a file *.safetensors, *{', *'.join(TORCH)} (default: the checkpoint folder)"
    parser.add_argument("output", nargs="?", help=files)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-t", "--tag", help="the checkpoint to convert, such as step-00000120 (default: the newest)")
    which.add_argument("--best", action="store_true", help="convert the checkpoint that the file `best` names")
    size_help = "most bytes of tensors per output file (default: 5GB)"
    parser.add_argument("--max-shard-size", "--max_shard_size", default="5GB", metavar="SIZE", help=size_help)
    form_help = "format of the files in a folder: safetensors (default), or torch for pytorch_model.bin"
    parser.add_argument("--format", choices=("safetensors", "torch"), default="", help=form_help)
    safe = ("--safe-serialization", "--safe_serialization")
    parser.add_argument(
        *safe, dest="format", action="store_const", const="safetensors", help="same as --format safetensors"
    )
    frozen = ("--exclude-frozen-parameters", "--exclude_frozen_parameters")
    parser.add_argument(*frozen, action="store_true", help="omit parameters that were not trained")
    parser.add_argument("--ema", action="store_true", help="convert the averages of weights instead of the weights")
    parser.add_argument("--overwrite", action="store_true", help="replace earlier output in the same format")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(arguments)
    # Exit through `finally`, so that SIGTERM leaves no half-written files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        limit, place = parse_size(given.max_shard_size), Folder(given.checkpoint_dir)
        parent, name = os.path.split(place.root)
        source, record = locate(place, Folder(parent), name, read_best(place) if given.best else given.tag)
        checkpoint = read_checkpoint(source, record)
        if given.ema:
            checkpoint = with_averages(checkpoint)
        if given.exclude_frozen_parameters:
            checkpoint = without_frozen(checkpoint)
        out = given.output or source.root
        written = export(source, checkpoint, out, Fp32(), limit, given.overwrite, form=given.format)
        report(checkpoint, written)
    except (Problem, OSError) as error:
        if given.debug:
            raise
        first, *rest = f"zero_to_fp32: {error}".split("\n")
        say(first, sys.stderr)
        for line in rest:
            say(f"  {line.lstrip()}", sys.stderr)
        return error.exit_code if isinstance(error, Problem) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
