"""Verifies every byte of a checkpoint against its digests. Reads each file once, and reports all damage together.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.headers import MAX_HEADER, parse_header
from dsjob.checkpoint.root.source import find_root, locate, renamed

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """Damage to a checkpoint: the file (relative to the root), and if known, the tensor and where its bytes are in the
    file."""

    file: str
    what: str
    tensor: str | None = None
    offset: int | None = None
    length: int | None = None

    def __str__(self) -> str:
        place = f", tensor {self.tensor[:200]!r}, the {self.length} bytes at {self.offset}" if self.tensor else ""
        return f"{self.file}{place}: {self.what}"


@dataclass(frozen=True)
class Verified:
    """The result for one checkpoint. `unchecked`: chunks saved without a digest. `size`: bytes read."""

    tag: str
    folder: str
    size: int
    chunks: int
    unchecked: int
    damages: tuple[Damage, ...]


def verify(
    url: str, tag: str | None = None, *, every: bool = False, progress: Progress | None = None
) -> list[Verified]:
    """Verifies a checkpoint (by default the newest), or with `every` all checkpoints of the root.

    Returns damage instead of raising it. Raises NoCheckpointError, StorageError, UsageError, and CorruptCheckpointError
    if the commit record of the chosen checkpoint is unreadable.
    """
    with renamed(f"read {url}"):
        root, _ = find_root(url)
        tags = layout.list_tags(root)
        # `locate` raises if there is no checkpoint, and finds the newest one or that of a step's folder.
        if not every or not tags:
            root, record = locate(url, tag)
            tags = [record["tag"]]
        found = [open_checkpoint(root, name) for name in tags]
        total = sum(sum(c.files.values()) for c in found if isinstance(c, layout.Checkpoint))
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(done, total)

        return [
            verify_checkpoint(root, one, count)
            if isinstance(one, layout.Checkpoint)
            else Verified(name, "", 0, 0, 0, (one,))
            for name, one in zip(tags, found, strict=True)
        ]


def open_checkpoint(root: layout.Folder, tag: str) -> layout.Checkpoint | Damage:
    """Opens the checkpoint of a tag. Returns the damage if its record or manifest is damaged."""
    try:
        return layout.read_checkpoint(root, layout.read_commit(root, tag))
    except layout.Damaged as error:
        return Damage(f"commits/{tag}.json", error.message)


def verify_checkpoint(
    root: layout.Folder, checkpoint: layout.Checkpoint, count: Callable[[int], None] = lambda size: None
) -> Verified:
    """Reads and verifies all shards in the manifest, state.json and job.json."""
    damages: list[Damage] = []
    try:
        for name, spans in find_spans(checkpoint).items():
            for block in read_file(root, checkpoint, name, spans, damages):
                count(len(block))
        for name in ("state", "job"):
            digest = checkpoint.manifest.get(f"{name}_sha256")
            if name == "state" or digest or f"{name}.json" in root.names(checkpoint.folder):
                layout.read_object(root, f"{checkpoint.folder}/{name}.json", layout.MAX_MANIFEST, str(digest or ""))
    except layout.Damaged as error:
        damages.append(Damage(checkpoint.folder, error.message))
    chunks = [chunk for tensor in checkpoint.tensors.values() for chunk in tensor.chunks if chunk.length]
    unchecked = sum(not chunk.sha256 for chunk in chunks)
    size = sum(checkpoint.files.values())
    return Verified(checkpoint.tag, checkpoint.folder, size, len(chunks), unchecked, tuple(damages))


class Span:
    """Where a chunk lies in its file, in bytes."""

    def __init__(self, name: str, dtype: str, chunk: layout.Chunk) -> None:
        self.name, self.dtype, self.chunk = name, dtype, chunk
        self.start, self.end = chunk.start, chunk.start + chunk.length


def find_spans(checkpoint: layout.Checkpoint) -> dict[str, list[Span]]:
    """The chunks in each file, in the order of their bytes. Raises Damaged if two chunks overlap."""
    found: dict[str, list[Span]] = {name: [] for name in checkpoint.files}
    for name, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.length:
                found[chunk.file].append(Span(name, tensor.dtype, chunk))
    for file, spans in found.items():
        spans.sort(key=lambda span: span.start)
        for before, after in itertools.pairwise(spans):
            if after.start < before.end:
                names = f"{before.name[:200]!r} and {after.name[:200]!r}"
                raise layout.Damaged(f"{checkpoint.folder}/{file}: the manifest assigns the same bytes to {names}")
    return found


def read_file(
    root: layout.Folder, checkpoint: layout.Checkpoint, name: str, spans: list[Span], damages: list[Damage]
) -> Iterator[memoryview]:
    """Yields the bytes of a shard in order. Each block is valid until the next one. Appends damage to `damages`.

    A chunk can only be verified at its end, so a block may contain bytes of a damaged chunk that is not reported yet.
    """
    place, size = f"{checkpoint.folder}/{name}", checkpoint.files[name]
    header, first = bytearray(), min(spans[0].start if spans else size, MAX_HEADER)
    try:
        with root.open_file(place) as file:
            found = file.seek(0, os.SEEK_END)
            if found != size:
                damages.append(Damage(place, f"it has {found} bytes; the manifest says {size}"))
            file.seek(0)
            size = min(size, found)
            buffer, position, waiting = memoryview(bytearray(min(layout.BUFFER, size))), 0, list(reversed(spans))
            digest = hashlib.sha256()
            while position < size:
                view = buffer[: min(len(buffer), size - position)]
                if not layout.read_exactly(file, view):
                    damages.append(Damage(place, f"it is truncated at byte {position}"))
                    return
                # The bytes before the first chunk are the header, which `_check_header` compares with the manifest.
                header += view[: max(0, first - position)]
                # Hash the part of each chunk that lies in this block. `waiting` has the next chunk at its end; a chunk
                # that continues into the next block stays there, with its digest so far.
                while waiting and waiting[-1].start < position + len(view):
                    span = waiting[-1]
                    digest.update(view[max(0, span.start - position) : span.end - position])
                    if span.end > position + len(view):
                        break
                    if span.chunk.sha256 and digest.hexdigest() != span.chunk.sha256:
                        damages.append(_damage(place, "they do not match their sha256", span))
                    digest = hashlib.sha256()
                    waiting.pop()
                position += len(view)
                yield view
    except FileNotFoundError:
        damages.append(Damage(place, "it is missing"))
        return
    except layout.Damaged as error:
        damages.append(Damage(place, error.message))
        return
    # What is still waiting lies behind the end of the file.
    damages += [_damage(place, "they are truncated", span) for span in reversed(waiting)]
    if not waiting and (wrong := _check_header(header, spans)):
        damages.append(Damage(place, wrong))


def _damage(place: str, what: str, span: Span) -> Damage:
    return Damage(place, what, span.name, span.start, span.chunk.length)


def _check_header(header: bytearray, spans: list[Span]) -> str:
    """What is wrong with a shard's safetensors header, or "". dsjob does not use the header, but other programs do."""
    length = int.from_bytes(header[:8], "little")
    try:
        found = parse_header(header[8:]) if 8 + length == len(header) else None
    except (ValueError, RecursionError):
        found = None
    expected = {
        f"{span.name}@{','.join(map(str, span.chunk.offsets))}": {
            "dtype": span.dtype,
            "shape": list(span.chunk.sizes),
            "data_offsets": [span.start - len(header), span.end - len(header)],
        }
        for span in spans
    }
    return "" if found == expected else "its safetensors header does not match the manifest"
