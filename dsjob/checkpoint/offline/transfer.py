"""Copies checkpoints between paths and URLs. Verifies every digest on the way, and writes the commit record last.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import encode_json
from dsjob.checkpoint.offline.verify import Damage, Progress, find_spans, read_file
from dsjob.checkpoint.root.attempts import claim_once
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.inventory import read_saved
from dsjob.checkpoint.root.source import find_own_root, find_root, open_root, renamed
from dsjob.errors import CheckpointError, NoCheckpointError, UsageError
from dsjob.terminal import warn


@dataclass(frozen=True)
class Copied:
    """A copied checkpoint. `size`: bytes copied, 0 if the target already had the same checkpoint."""

    tag: str
    url: str
    size: int


def copy(
    source: str, target: str, *, tag: str | None = None, new_tag: str | None = None, progress: Progress | None = None
) -> list[Copied]:
    """Copies one checkpoint, or all of a root in the order of their steps, into the root `target`.

    source: as for `convert`. target: a folder or URL, or a run's folder. new_tag: the tag of the copy of one
    checkpoint, whose target may be its own root. Skips a tag whose checkpoint at the target is the same. Each
    checkpoint appears at the target complete or not at all; if one fails, those copied before it stay.
    Raises CorruptCheckpointError, NoCheckpointError, CheckpointError (the target has a different checkpoint with this
    tag), StorageError, UsageError.
    """
    if new_tag is not None and layout.NAME.fullmatch(new_tag) is None:
        raise UsageError(f"invalid tag {new_tag!r}", hint="use letters, digits, '.', '_' and '-'")
    with renamed(f"copy {source}"):
        root, name = find_root(source)
        if name and tag:
            raise UsageError(
                f"{source} is already the folder of one step", hint="omit --tag, or name its parent folder"
            )
        there = find_own_root(target) or open_root(target)
        if storage.join(there.root, "") == storage.join(root.root, "") and new_tag is None:
            raise UsageError(f"source and target are the same: {target}", hint="name another folder or URL")
        wanted = name or tag
        if new_tag is not None and not wanted:
            raise UsageError(f"{source} may hold several checkpoints, but only one can be {new_tag}", hint="name a tag")
        tags = layout.list_tags(root)
        if not tags:
            raise NoCheckpointError(
                f"no committed checkpoint in {root.root}", hint="name the folder that contains `commits`"
            )
        records = [layout.find_commit(root, wanted)] if wanted else [layout.read_commit(root, tag) for tag in tags]
        # Oldest first, so that an interrupted copy leaves a prefix of the run's history.
        records.sort(key=lambda record: int(record["step"]))
        checkpoints = [layout.read_checkpoint(root, record) for record in records]
        if new_tag is not None:
            (one,) = checkpoints
            checkpoints = [one._replace(tag=new_tag, manifest={**one.manifest, "tag": new_tag})]
        total, done = sum(sum(c.files.values()) for c in checkpoints), 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(done, total)

        catalog, files = Catalog(there.root), storage.find_files(storage.join(root.root, "commits"), deep=False)
        written = {name: found.written for name, found in files.items()}
        times = [read_saved(record, written.get(f"{record['tag']}.json")) for record in records]
        return [
            _copy_one(root, c, record.get("metrics"), saved, catalog, count)
            for c, record, saved in zip(checkpoints, records, times, strict=True)
        ]


def _copy_one(
    root: layout.Folder,
    checkpoint: layout.Checkpoint,
    metrics: dict[str, float] | None,
    saved: float | None,
    catalog: Catalog,
    count: Callable[[int], None],
) -> Copied:
    tag = checkpoint.tag
    there = {record["tag"]: record for record in catalog.records()}
    if tag in there:
        if there[tag]["manifest_sha256"] != hashlib.sha256(encode_json(checkpoint.manifest)).hexdigest():
            raise CheckpointError(
                f"{catalog.url} already has a different checkpoint {tag}",
                hint="copy to another folder, or copy another --tag",
            )
        count(sum(checkpoint.files.values()))
        return Copied(tag, storage.join(catalog.url, there[tag]["dir"]), 0)
    attempt = claim_once(catalog.url)
    folder = attempt.name_folder(tag)
    place = storage.join(catalog.url, folder)
    try:
        size = _copy_files(root, checkpoint, place, count)
        if tag in root.names("pinned"):  # before the commit, or a job's retention at the target could delete it
            storage.make_folder(storage.join(catalog.url, "pinned"))
            storage.write_bytes(storage.join(catalog.url, "pinned", tag), b"")
        newest = max((int(record["step"]) for record in there.values()), default=0)
        latest = checkpoint.step >= newest
        notes = catalog.commit(folder, checkpoint.manifest, attempt, latest=latest, metrics=metrics, saved=saved)
    except BaseException:
        catalog.discard(tag, folder)
        raise
    for note in notes:
        warn(f"{place} was copied, but: {note}", stacklevel=2)
    return Copied(tag, place, size)


def _copy_files(root: layout.Folder, checkpoint: layout.Checkpoint, place: str, count: Callable[[int], None]) -> int:
    """Copies everything except the manifest. Returns the bytes of the shards."""
    # Shards first. Without a commit record, readers ignore all of this.
    storage.make_folder(storage.join(place, "done"))
    for name, spans in find_spans(checkpoint).items():
        with storage.open_write(storage.join(place, name)) as file:
            damages: list[Damage] = []
            for block in read_file(root, checkpoint, name, spans, damages):
                file.write(block)
                count(len(block))
            if damages:
                raise layout.Damaged(f"{root.root}/{damages[0]}")
        written = storage.size(storage.join(place, name))
        if written != checkpoint.files[name]:
            raise CheckpointError(
                f"{place}/{name} has {written} bytes after copying, but its source has {checkpoint.files[name]}"
            )
    # Everything but the manifest, which `Catalog.commit` writes just before the commit record.
    for folder in ("", "done/"):
        for name in root.names(f"{checkpoint.folder}/{folder}".rstrip("/")):
            if layout.NAME.fullmatch(name) and name.endswith(".json") and name != "manifest.json":
                data = _read_small(root, f"{checkpoint.folder}/{folder}{name}")
                digest = checkpoint.manifest.get(f"{name[:-5]}_sha256") if not folder else None
                if digest and hashlib.sha256(data).hexdigest() != digest:
                    raise layout.Damaged(f"{root.root}/{checkpoint.folder}/{name} does not match its sha256")
                storage.write_bytes(storage.join(place, f"{folder}{name}"), bytes(data))
    return sum(checkpoint.files.values())


def _read_small(root: layout.Folder, name: str) -> bytearray:
    with root.open_file(name) as file:
        size = file.seek(0, os.SEEK_END)
        data = bytearray(size if size <= layout.MAX_MANIFEST else 0)
        file.seek(0)
        if size > layout.MAX_MANIFEST or not layout.read_exactly(file, memoryview(data)):
            raise layout.Damaged(f"{root.root}/{name} is truncated, or larger than {layout.MAX_MANIFEST} bytes")
    return data
