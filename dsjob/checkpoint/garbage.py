"""What in a checkpoint root no checkpoint needs, and deleting it: left by killed runs, and by runs that went back.

Imports no torch.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Literal

from dsjob import storage
from dsjob.checkpoint.attempts import FOLDER, fences, newest_fencing
from dsjob.checkpoint.inventory import take_inventory

HOUR, DAY = 3600.0, 86400.0
# Of storage.write_bytes, and of what convert writes; whole paths.
TEMPORARY = re.compile(r".+\.[0-9a-f]{32}\.tmp|(.+/)?\.[^/]+\.[0-9a-f]{8}\.tmp")
RECORD = re.compile(r"superseded/([^/]+)\.json")  # of a checkpoint that was set aside, by its folder or tag


@dataclass(frozen=True)
class Garbage:
    """A folder or file, `path` below the root; `age` in seconds since it was last written, None where nobody knows.

    `kept`: why it is not deleted, "" where it is.
    """

    kind: Literal["partial", "superseded", "temporary"]
    path: str
    size: int
    age: float | None
    kept: str


def collect(url: str, *, older_than: float = HOUR, dry_run: bool = False) -> tuple[str, list[Garbage], int]:
    """The root that `url` means, what is garbage there, deleted unless `dry_run`, and how many uploads to an object
    store that never ended were aborted (begun more than a day ago; none with `dry_run`). `older_than`: seconds.

    A checkpoint with a commit record is never touched, damaged or not. Raises NoCheckpointError, StorageError.
    """
    inventory, now = take_inventory(url), time.time()
    newest = newest_fencing(inventory.url)
    files = storage.find_files(inventory.url)
    unread = {entry.tag for entry in inventory.checkpoints if entry.state == "damaged" and not entry.folder}
    unread |= {known[1] for path in files if (known := RECORD.fullmatch(path))}  # set aside by tag: damaged
    found: list[Garbage] = []
    for entry in inventory.checkpoints:
        if entry.state in ("partial", "superseded"):
            age = None if entry.saved is None else now - entry.saved
            named = FOLDER.fullmatch(entry.folder)
            attempt = int(named["attempt"]) if named else 0
            alive = entry.state == "partial" and (attempt >= newest or not fences(inventory.url, attempt))
            kept = _find_reason_to_keep(alive, age, older_than)
            if entry.state == "partial" and entry.tag in unread:
                kept = "the record of its tag is there and cannot be read, or was set aside as damaged"
            kind: Literal["partial", "superseded"] = "partial" if entry.state == "partial" else "superseded"
            found.append(Garbage(kind, entry.folder, entry.size, age, kept))
    folders = {entry.folder for entry in inventory.checkpoints}
    gone = {entry.path for entry in found}
    tags = {entry.tag for entry in inventory.checkpoints if entry.state == "partial"}
    for path, file in files.items():
        age = None if file.written is None else now - file.written
        if TEMPORARY.fullmatch(path) and path.partition("/")[0] not in gone:
            found.append(Garbage("temporary", path, file.size, age, _find_reason_to_keep(False, age, older_than)))
        record = RECORD.fullmatch(path)
        # Its folder is gone, or committed again.
        if record and record[1] not in tags and (record[1] not in folders or record[1] not in gone):
            found.append(Garbage("superseded", path, file.size, age, _find_reason_to_keep(False, age, older_than)))
    for item in found if not dry_run else ():
        if not item.kept:
            _delete(inventory.url, item)
    uploads = 0 if dry_run else storage.abort_uploads(inventory.url, hours=max(older_than, DAY) / HOUR)
    return inventory.url, found, uploads


def _find_reason_to_keep(alive: bool, age: float | None, older_than: float) -> str:
    """Why somebody may still need it: an older attempt is over once a newer one has begun, and its last writes with it;
    the newest one, and a program that is never fenced, may be `alive`, but no save pauses for a day."""
    if age is None:
        return "its age is not known here"
    limit = max(older_than, DAY) if alive else older_than
    if age >= limit:
        return ""
    return "a run of the newest attempt may be writing it" if alive else "written too recently"


def _delete(root: str, item: Garbage) -> None:
    if item.kind == "superseded":  # the record first: a folder that is half gone must not have one
        storage.delete(storage.join(root, "superseded", f"{item.path.rpartition('/')[2].removesuffix('.json')}.json"))
    storage.delete(storage.join(root, item.path))
