"""Writes and reads safetensors shards, at any path or URL.

DCP (torch.distributed.checkpoint) plans which rank writes and reads which box of which tensor. Each rank writes one
file, and hashes each chunk while writing it. Reading verifies each chunk that it uses.

DCP's own storage formats are not used: they execute code on load and have no checksums. Hashing takes most of the CPU
time of a save, so it runs in a thread beside writing. Where possible, chunks are read straight into the tensors, and
verified afterwards. So after a failed load, an engine contains parts of both states and must not be used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.dtypes import DTYPES, NAMES
from dsjob.checkpoint.format.values import encode_json
from dsjob.checkpoint.live.split_tensors import SplitTensor, find_layout, take_box
from dsjob.errors import CorruptCheckpointError
from dsjob.ops.disk import read_mapped
from dsjob.ranks.agreement import all_gather, gather_on_rank_0, scatter
from dsjob.ranks.mesh import Ranks

_SLICE, _SMALL = 8 << 20, 64 << 10  # bytes; anything smaller is hashed without waking another thread
_READERS = 4  # threads per rank; each reads and verifies one chunk at a time
Tensors = Mapping[str, Tensor | SplitTensor]
_Chunk = dict[str, Any]  # as in a manifest: file, start, length, offsets, sizes, sha256


def shard_name(rank: int, world_size: int) -> str:
    """The name of a rank's file."""
    return f"r{rank:05d}-of-{world_size:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of the tensor `name` that one rank writes. `offsets`: its first index per dim, in global coordinates."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


class Planner:
    """Decides which boxes each rank writes. DCP's planning takes longer than copying the tensors, so the plan is reused
    as long as the tensors of all ranks have the same names, shapes, dtypes and placements."""

    def __init__(self, everyone: Ranks) -> None:
        self._everyone = everyone
        self._key: list[Any] | None = None
        self._places: list[tuple[str, tuple[int, ...]]] = []
        self._described: dict[str, TensorStorageMetadata] = {}

    def plan(self, tensors: Tensors) -> tuple[list[Part], dict[str, TensorStorageMetadata]]:
        """The parts of `tensors` that this rank writes, and on rank 0 the metadata of all tensors. A collective.

        Rank 0 writes replicated tensors. If ranks differ (as the buffers of batch norm may), rank 0's values are saved.
        """
        # Everything a plan depends on. Planning is a collective, so a new key on any rank makes all ranks plan.
        # tensor.shape is the whole shape, also of a shard.
        key = [(name, tensor.shape, tensor.dtype, find_layout(tensor)) for name, tensor in tensors.items()]
        if not all(all_gather(self._everyone, key == self._key)):
            self._key = None  # if planning fails on one rank only, all ranks must plan again next time
            self._places, self._described = _plan_anew(tensors, self._everyone)
            self._key = key
        # The plan stays, but the tensors may be new objects, so look them up by name each time.
        parts = [Part(name, offsets, take_box(tensors[name], offsets)) for name, offsets in self._places]
        return parts, self._described


def _plan_anew(
    tensors: Tensors, everyone: Ranks
) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, TensorStorageMetadata]]:
    """The names and offsets of this rank's boxes, and on rank 0 the metadata of all tensors."""
    # dedup_save_to_lowest_rank: only the lowest rank that holds a replicated tensor writes it.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner(dict(tensors), is_coordinator=everyone.rank == 0)
    plans = gather_on_rank_0(everyone, planner.create_local_plan)
    described: dict[str, TensorStorageMetadata] = {}

    def plan_all() -> list[SavePlan]:
        final, metadata = planner.create_global_plan(plans)
        described.update(cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata))
        return final

    plan = planner.finish_plan(scatter(everyone, plan_all))
    boxes = [
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets)) for item in plan.items if item.tensor_data is not None
    ]
    # If a tensor has fewer rows than there are ranks, some ranks hold empty shards, which need not be written.
    return [(name, offsets) for name, offsets in boxes if take_box(tensors[name], offsets).numel()], described


def write_shard(url: str, rank: int, world_size: int, parts: list[Part]) -> dict[str, Any]:
    """Writes a rank's parts into the folder `url`, then its completion record. Returns the record."""
    storage.make_folder(storage.join(url, "done"))
    name = shard_name(rank, world_size)
    # A rank may have nothing to write, such as a replica at stage 0. Its record still tells rank 0 that it is done.
    chunks, size = _write_file(storage.join(url, name), parts) if parts else ([], 0)
    record = {"rank": rank, "file": name if parts else None, "size": size, "chunks": chunks}
    # Last: in a background save, rank 0 takes the record as proof that the file is complete.
    write_record(url, rank, record)
    return record


def write_record(url: str, rank: int, record: dict[str, Any]) -> None:
    """Writes a rank's completion record: what it wrote, or the error."""
    text = encode_json(record)
    text = encode_json({**record, "record_sha256": hashlib.sha256(text).hexdigest()})
    storage.write_bytes(storage.join(url, "done", f"r{rank:05d}.json"), text)


def read_record(url: str, rank: int) -> dict[str, Any]:
    """Reads the record that `write_record` wrote. Raises CorruptCheckpointError if its digest differs, StorageError."""
    place = storage.join(url, "done", f"r{rank:05d}.json")
    try:
        record: dict[str, Any] = json.loads(storage.read_bytes(place))
        digest = record.pop("record_sha256")
        # Hash the record without its digest, in the same canonical form as when it was written.
        if hashlib.sha256(encode_json(record)).hexdigest() == digest:
            return record
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    raise CorruptCheckpointError(f"{place} is damaged: it does not match the digest that rank {rank} wrote")


def _write_file(url: str, parts: list[Part]) -> tuple[list[_Chunk], int]:
    """Writes a safetensors file. Returns its chunks for the manifest, and its size in bytes."""
    header, spans, position = {}, [], 0
    for part in parts:
        end = position + part.tensor.numel() * part.tensor.dtype.itemsize
        # The offsets in the key say which box of the tensor this is, for someone who has only this file.
        key = f"{part.name}@{','.join(map(str, part.offsets))}"
        span = [position, end]
        # data_offsets are relative to the end of the header, as the format requires; `start` in the manifest is
        # absolute.
        header[key] = {"dtype": NAMES[part.tensor.dtype], "shape": list(part.tensor.shape), "data_offsets": span}
        spans.append(span)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data must begin at a multiple of 8. The JSON header may end in spaces.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    chunks: list[_Chunk] = []
    with storage.open_write(url) as file, ThreadPoolExecutor(1) as hasher:
        # 8 bytes: the length of the header, then the header itself.
        file.write(len(text).to_bytes(8, "little") + text)
        for part, (begin, end) in zip(parts, spans, strict=True):
            digest = _write_tensor(file, part.tensor, hasher)
            place = {"tensor": part.name, "start": start + begin, "length": end - begin, "sha256": digest}
            chunks.append({**place, "offsets": list(part.offsets), "sizes": list(part.tensor.shape)})
    return chunks, start + position


def _write_tensor(file: BinaryIO, tensor: Tensor, hasher: ThreadPoolExecutor) -> str:
    """Writes a tensor's bytes in row-major order. Returns their sha256."""
    digest = hashlib.sha256()
    # Copy one tensor at a time to the host, whose memory may not hold the whole shard.
    flat = read_mapped(tensor).cpu().contiguous().reshape(-1)
    # view(uint8), because numpy has no bf16. The memoryview shares the tensor's memory.
    data = memoryview(flat.view(torch.uint8).numpy().data)
    for offset in range(0, len(data), _SLICE):
        part = data[offset : offset + _SLICE]
        if len(part) < _SMALL:
            digest.update(part)
            file.write(part)
            continue
        hashing = hasher.submit(digest.update, part)  # in parallel with writing: both release the GIL
        file.write(part)
        hashing.result()
    return digest.hexdigest()


def list_tensors(
    described: dict[str, TensorStorageMetadata], records: list[dict[str, Any]], role: Callable[[str], str]
) -> dict[str, Any]:
    """The `tensors` of a manifest: each tensor with its chunks, collected from the records of all ranks."""
    tensors: dict[str, Any] = {}
    for name, entry in described.items():
        dtype = NAMES[entry.properties.dtype]
        tensors[name] = {"role": role(name), "dtype": dtype, "shape": list(entry.size), "chunks": []}
    for record in records:
        for chunk in record["chunks"]:
            # `file` is known only per record: a rank writes one file.
            place = {key: value for key, value in chunk.items() if key != "tensor"}
            tensors[chunk["tensor"]]["chunks"].append({"file": record["file"], **place})
    return tensors


class ShardReader(StorageReader):
    """DCP's storage interface over a committed checkpoint: reads the boxes that a load plan asks for."""

    def __init__(self, source: layout.Folder, checkpoint: layout.Checkpoint) -> None:
        self._source, self._checkpoint = source, checkpoint

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for name, tensor in self._checkpoint.tensors.items():
            # DCP intersects these boxes with those that a rank holds. So the layout of the save need not match that of
            # the load.
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            entries[name] = TensorStorageMetadata(
                TensorProperties(DTYPES[tensor.dtype]), torch.Size(tensor.shape), boxes
            )
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # Group the items by chunk: a chunk can only be verified as a whole, so it is read once for all its targets.
        wanted: dict[tuple[str, int], list[tuple[ReadItem, Tensor]]] = {}
        for item in plan.items:
            tensor = self._checkpoint.tensors[item.storage_index.fqn]
            place = item.storage_index.offset
            number = next(i for i, c in enumerate(tensor.chunks) if torch.Size(c.offsets) == place and c.length)
            wanted.setdefault((item.storage_index.fqn, number), []).append((item, planner.resolve_tensor(item)))
        # One reader per thread: a reader seeks in its open files.
        readers = [layout.Shards(self._source, self._checkpoint) for _ in range(_READERS)]
        free: SimpleQueue[layout.Shards] = SimpleQueue()
        for reader in readers:
            free.put(reader)
        pool = ThreadPoolExecutor(_READERS)
        try:
            jobs = {pool.submit(self._read_chunk, free, *key, pairs): pairs for key, pairs in wanted.items()}
            for job, pairs in jobs.items():
                # Raises the first error of a thread; `finally` then cancels the rest.
                job.result()
                for item, target in pairs:
                    planner.commit_tensor(item, target)
        finally:
            pool.shutdown(cancel_futures=True)
            for reader in readers:
                reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _read_chunk(
        self, free: SimpleQueue[layout.Shards], name: str, number: int, pairs: list[tuple[ReadItem, Tensor]]
    ) -> None:
        """Reads and verifies a chunk, and copies its parts to their targets. Runs in a thread of the pool."""
        tensor = self._checkpoint.tensors[name]
        chunk = tensor.chunks[number]
        (item, target), *more = pairs
        whole = tuple(item.lengths) == chunk.sizes and not more
        # If the target's memory has exactly the layout of the chunk, read straight into it. Otherwise, read the chunk
        # into a buffer.
        direct = whole and target.is_cpu and target.is_contiguous() and target.dtype == DTYPES[tensor.dtype]
        box = target.detach() if direct else torch.empty(chunk.sizes, dtype=DTYPES[tensor.dtype])
        data = memoryview(box.reshape(-1).view(torch.uint8).numpy().data)
        shards, digest = free.get(), hashlib.sha256()
        try:
            for start in range(0, max(chunk.length, 1), _SLICE):
                shards.read(name, chunk, start, digest, data[start : start + _SLICE])
        finally:
            free.put(shards)
        for item, target in [] if direct else pairs:
            # The overlap of the boxes of chunk and target, in the chunk's own coordinates.
            part = box[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
            target.detach().copy_(part)
