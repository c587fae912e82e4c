"""The committed checkpoints below one URL: finding, committing, retiring. No tensors and no ranks here.

A folder without a commit record does not exist. A commit record is created exclusively, written last and deleted first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as layout
from dsjob.checkpoint.source import open_root, renamed
from dsjob.errors import CheckpointError


class Catalog:
    """The checkpoints of one root folder (a path or URL)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def newest(self) -> str | None:
        """The tag of the newest checkpoint; None where there is none."""
        with renamed(f"read {self.url}"):
            try:
                return str(layout.find_commit(open_root(self.url))["tag"])
            except layout.NothingThere:
                return None

    def find(self, tag: str | None) -> dict[str, Any]:
        """The commit record of a tag, or of the newest checkpoint. Raises NoCheckpointError."""
        with renamed(f"read {self.url}"):
            return layout.find_commit(open_root(self.url), tag)

    def records(self) -> list[dict[str, Any]]:
        """All commit records, in the order of their steps."""
        tags = [name[:-5] for name in storage.list_names(self._commit_url()) if name.endswith(".json")]
        root = open_root(self.url)
        with renamed(f"read {self.url}"):
            records = [layout.read_commit(root, tag) for tag in tags]
        return sorted(records, key=lambda record: int(record["step"]))

    def next_attempt(self) -> int:
        """A number that no folder here has yet: what one run of a job writes is told apart by it."""
        numbers = [int(found[1]) for name in storage.list_names(self.url) if (found := re.search(r"-a(\d{4,})$", name))]
        return max(numbers, default=0) + 1

    def commit(
        self, folder: str, manifest: Mapping[str, Any], attempt: int, *, latest: bool, replace: bool = False
    ) -> None:
        """Writes the manifest and makes the folder a checkpoint.

        Where the tag is taken: with `replace`, the new checkpoint takes the place of the old one at once, whose folder
        is then deleted; else CheckpointError.
        """
        text = encode_json(manifest)
        storage.write_bytes(storage.join(self.url, folder, "manifest.json"), text)
        tag = manifest["tag"]
        record = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "tag": tag,
            "step": manifest["step"],
            "attempt": attempt,
            "dir": folder,
            "manifest_sha256": hashlib.sha256(text).hexdigest(),
        }
        storage.make_folder(self._commit_url())
        storage.sync_folder(self.url)
        before = self.find(tag)["dir"] if replace and storage.exists(self._commit_url(tag)) else None
        if before is not None:
            storage.write_bytes(self._commit_url(tag), encode_json(record))
            storage.delete(storage.join(self.url, before))
        else:
            self._create_record(tag, record)
        if latest:
            storage.write_bytes(storage.join(self.url, "latest"), f"{tag}\n".encode())
        script = storage.join(self.url, "zero_to_fp32.py")
        if not storage.exists(script):
            source = resources.files("dsjob.checkpoint").joinpath("zero_to_fp32.py")
            storage.write_bytes(script, source.read_bytes())

    def _create_record(self, tag: str, record: Mapping[str, Any]) -> None:
        try:
            storage.create_bytes(self._commit_url(tag), encode_json(record))
        except FileExistsError:
            raise CheckpointError(
                f"{self.url} holds a checkpoint {tag} already", hint="save to another folder: checkpoint.dir=..."
            ) from None

    def discard(self, tag: str, folder: str) -> None:
        """Deletes what a failed save left, so that a full disk has its space back; never what was committed."""
        if not storage.exists(self._commit_url(tag)) or self.find(tag)["dir"] != folder:
            storage.delete(storage.join(self.url, folder))

    def retire(self, keep: int) -> None:
        """Deletes all but the newest `keep` checkpoints; 0 keeps all."""
        for record in self.records()[:-keep] if keep else []:
            storage.delete(self._commit_url(record["tag"]))
            storage.delete(storage.join(self.url, record["dir"]))

    def set_aside(self, newer_than: int) -> None:
        """Moves the commit records of later steps out of the way of a run that goes back; their folders stay."""
        for record in self.records():
            if record["step"] > newer_than:
                text = storage.read_bytes(self._commit_url(record["tag"]))
                storage.make_folder(storage.join(self.url, "superseded"))
                storage.write_bytes(storage.join(self.url, "superseded", f"{record['dir']}.json"), text)
                storage.delete(self._commit_url(record["tag"]))

    def _commit_url(self, tag: str | None = None) -> str:
        return storage.join(self.url, "commits", *([f"{tag}.json"] if tag else []))


def encode_json(value: Any) -> bytes:
    """`value` as compact JSON. Raises ValueError for nan and inf."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
