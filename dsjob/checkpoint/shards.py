"""DCP's storage layer for the format of `DESIGN` section 5: safetensors shards and a JSON manifest, over any URL.

DCP plans which rank writes and reads which box of which tensor; here those boxes meet bytes. A rank writes one file,
header first, each chunk hashed on its way. Reading verifies each chunk that it uses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as layout

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SLICE = 8 << 20
_Chunk = dict[str, Any]  # of a manifest: file, start, length, offsets, sizes, sha256


def shard_name(rank: int, world_size: int) -> str:
    """The file that a rank writes."""
    return f"r{rank:05d}-of-{world_size:05d}.safetensors"


class ShardWriter(StorageWriter):
    """Writes one checkpoint's folder. `tensors` holds the manifest's entries once the save is done (rank 0 alone)."""

    def __init__(self, url: str, role: Callable[[str], str]) -> None:
        self.url, self._role = url, role
        self.tensors: dict[str, Any] = {}
        self.files: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        storage.make_folder(storage.join(self.url, "done"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, world_size = plan.storage_data
        items = [item for item in plan.items if math.prod(_box(item).sizes)]
        name = shard_name(rank, world_size)
        chunks, size = self._write_shard(name, items, planner) if items else ([], 0)
        record = {"rank": rank, "files": {name: {"size": size}} if items else {}, "chunks": len(items)}
        storage.write_bytes(storage.join(self.url, "done", f"r{rank:05d}.json"), json.dumps(record).encode())
        empty = [item for item in plan.items if not math.prod(_box(item).sizes)]
        results = [WriteResult(item.index, chunk["length"], chunk) for item, chunk in zip(items, chunks, strict=True)]
        results += [WriteResult(item.index, 0, None) for item in empty]
        results.append(
            WriteResult(MetadataIndex(f"file {name}"), size, {"file": name, "size": size} if items else None)
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_shard(self, name: str, items: list[WriteItem], planner: SavePlanner) -> tuple[list[_Chunk], int]:
        """Writes the shard; its chunks for the manifest, and its size in bytes."""
        header, spans, position = {}, [], 0
        for item in items:
            box, dtype = _box(item), _dtype(item)
            end = position + math.prod(box.sizes) * dtype.itemsize
            key = f"{item.index.fqn}@{','.join(map(str, box.offsets))}"
            header[key] = {"dtype": NAMES[dtype], "shape": list(box.sizes), "data_offsets": [position, end]}
            spans.append((position, end - position))
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        chunks: list[_Chunk] = []
        with storage.open_write(storage.join(self.url, name)) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for item, (offset, length) in zip(items, spans, strict=True):
                digest = _write_tensor(file, cast(Tensor, planner.resolve_data(item)))
                box = _box(item)
                place = {"file": name, "start": start + offset, "length": length, "sha256": digest}
                chunks.append({**place, "offsets": list(box.offsets), "sizes": list(box.sizes)})
        return chunks, start + position

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
            dtype = NAMES[entry.properties.dtype]
            self.tensors[name] = {"role": self._role(name), "dtype": dtype, "shape": list(entry.size), "chunks": []}
        for result in (result for of_rank in results for result in of_rank):
            data = result.storage_data
            if data is None:
                continue
            if "start" in data:
                self.tensors[result.index.fqn]["chunks"].append(data)
            else:
                self.files[data["file"]] = {"size": data["size"]}


def _box(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None  # the state holds nothing but tensors
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _write_tensor(file: BinaryIO, tensor: Tensor) -> str:
    """Writes a tensor's bytes in row-major order; their sha256."""
    digest = hashlib.sha256()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy().data)
    for offset in range(0, len(data), _SLICE):
        file.write(data[offset : offset + _SLICE])
        digest.update(data[offset : offset + _SLICE])
    return digest.hexdigest()


class ShardReader(StorageReader):
    """Reads the boxes that a load plan asks for from a committed checkpoint."""

    def __init__(self, source: layout.Folder, checkpoint: layout.Checkpoint) -> None:
        self._shards = layout.Shards(source, checkpoint)
        self._checkpoint = checkpoint

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for name, tensor in self._checkpoint.tensors.items():
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
        wanted: dict[tuple[str, int], list[Any]] = {}
        for item in plan.items:
            tensor = self._checkpoint.tensors[item.storage_index.fqn]
            place = item.storage_index.offset
            number = next(i for i, chunk in enumerate(tensor.chunks) if torch.Size(chunk.offsets) == place)
            wanted.setdefault((item.storage_index.fqn, number), []).append(item)
        try:
            for (name, number), items in wanted.items():
                box = self._read_chunk(name, number)
                for item in items:
                    target = planner.resolve_tensor(item)
                    part = box[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
                    target.detach().copy_(part)
                    planner.commit_tensor(item, target)
        finally:
            self._shards.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _read_chunk(self, name: str, number: int) -> Tensor:
        tensor = self._checkpoint.tensors[name]
        chunk = tensor.chunks[number]
        data = bytearray(chunk.length)
        self._shards.read(name, chunk, 0, hashlib.sha256(), memoryview(data))
        return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).reshape(chunk.sizes)
