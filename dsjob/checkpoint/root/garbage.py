"""Finds and deletes what no checkpoint in a root needs: leftovers of killed runs, and of runs that were rewound.

Imports no torch.

Older runs are fenced, so a new run deletes what they never committed. Leftovers of programs that call
`save_checkpoint` are deleted a day after their last write. Folders whose tag has an unreadable record, or was set aside
as damaged, are kept. Listings of object stores lag, so the commit record is requested by name before its folder is
deleted. Only names that dsjob uses are considered, since others may use the same bucket.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.attempts import FOLDER, Attempt, fences, newest_fencing
from dsjob.checkpoint.root.catalog import noting
from dsjob.checkpoint.root.inventory import Listed, list_unfinished
from dsjob.checkpoint.root.source import find_root, open_root, renamed
from dsjob.errors import CorruptCheckpointError, NoCheckpointError

HOUR, DAY = 3600.0, 86400.0
PLACES = ("attempts", "commits", "pinned", "superseded")  # the folders of a root, apart from those of saves
# For fullmatch: temporary files of storage.write_bytes, and of convert.
TEMPORARY = re.compile(r".+\.[0-9a-f]{32}\.tmp|(.+/)?\.[^/]+\.[0-9a-f]{8}\.tmp")
RECORD = re.compile(r"superseded/([^/]+)\.json")  # the record of a checkpoint that was set aside; by folder, or by tag
UNREAD = "the commit record of its tag is unreadable, or was set aside as damaged"
OTHERS = "another run has written it"
NEEDED = "the commit record of its tag names this folder, or one that is missing"


@dataclass(frozen=True)
class Garbage:
    """A folder or file at `path`, relative to the root. `age`: seconds since its last write, None if unknown.

    `kept`: why it is not deleted, or "" if it is.
    """

    kind: Literal["partial", "superseded", "temporary"]
    path: str
    size: int
    age: float | None
    kept: str


def collect(url: str, *, older_than: float = HOUR, dry_run: bool = False) -> tuple[str, list[Garbage], int]:
    """Deletes garbage older than `older_than` seconds, unless `dry_run`. Returns the root that `url` refers to, the
    garbage in it, and how many unfinished uploads to an object store were aborted (those begun more than a day ago).

    Never touches a checkpoint with a commit record, damaged or not. Raises NoCheckpointError, StorageError.
    """
    with renamed(f"read {url}"):
        root = find_root(url)[0].root
    found = find_garbage(root, older_than=older_than)
    if not found and not storage.list_names(storage.join(root, "commits")):
        raise NoCheckpointError(f"no checkpoint in {root}", hint="name a run's folder or a checkpoint folder")
    for item in found if not dry_run else ():
        if not item.kept:
            _delete(root, item)
    # Uploads that never finished are not files yet, so no listing shows them.
    uploads = 0 if dry_run else storage.abort_uploads(root, hours=max(older_than, DAY) / HOUR)
    return root, found, uploads


def clear(url: str, attempt: Attempt) -> tuple[str, ...]:
    """Cleans up when a run begins. Returns what failed, as notes.

    Deletes what `collect` does, and everything that older runs (now fenced) never committed. Does not delete
    superseded checkpoints: that is the user's decision.
    """

    def delete() -> None:
        for item in find_garbage(url, older_than=HOUR, asking=attempt):
            if not item.kept and item.kind != "superseded":
                _delete(url, item)

    of_saves = lambda path: bool(FOLDER.fullmatch(path.partition("/")[0]))  # noqa: E731
    return noting(delete) + noting(lambda: storage.abort_uploads(url, hours=DAY / HOUR, of=of_saves))


def find_garbage(url: str, *, older_than: float, asking: Attempt | None = None) -> list[Garbage]:
    """The garbage in a root, each item with the reason to keep it, if any.

    asking: the run that asks, if it is not the user. What it has fenced can never become a checkpoint, however recent.
    For a run, only files that runs write are considered; for a user, everything in the root.
    """
    names, now = storage.list_names(url), time.time()
    files = storage.find_files(url) if asking is None else _list_own(url, names)
    taken, unread = _read_records(url, files)
    unfinished = list_unfinished(names, files, taken)
    newest, found = newest_fencing(url), []
    for entry in unfinished:
        age = None if entry.saved is None else now - entry.saved
        kept = _find_reason_to_keep(_may_be_alive(url, entry, newest), age, older_than)
        # The order of these cases matters: a fenced save may go however recent it is, unless a record may name it.
        if entry.state == "partial" and entry.tag in unread:
            kept = UNREAD
        elif asking is not None and not asking.owns(_read_number(entry)):
            kept = OTHERS
        elif asking is not None and _is_fenced(entry, asking):
            kept = ""
        if entry.state == "partial" and not kept and not _is_unused(url, entry):
            kept = NEEDED
        kind: Literal["partial", "superseded"] = "partial" if entry.state == "partial" else "superseded"
        found.append(Garbage(kind, entry.folder, entry.size, age, kept))
    folders = {entry.folder for entry in unfinished}
    tags = {entry.tag for entry in unfinished if entry.state == "partial"}
    for path, file in files.items():
        age = None if file.written is None else now - file.written
        kept = _find_reason_to_keep(False, age, older_than)
        record = RECORD.fullmatch(path)
        if TEMPORARY.fullmatch(path) and path.partition("/")[0] not in folders:
            found.append(Garbage("temporary", path, file.size, age, kept))
        elif record and record[1] not in folders | tags:  # its folder is gone, or was committed again
            found.append(Garbage("superseded", path, file.size, age, kept))
    return found


def _list_own(url: str, names: Iterable[str]) -> dict[str, storage.Found]:
    """The files of a root that a run may have written. Others may keep any number of files in the same bucket, so this
    does not list everything.

    names: the names in the root.
    """
    files = storage.find_files(url, deep=False)
    for name in names:
        if name in PLACES or FOLDER.fullmatch(name):
            below = storage.find_files(storage.join(url, name))
            files |= {f"{name}/{path}": found for path, found in below.items()}
    return files


def _read_records(url: str, files: Mapping[str, storage.Found]) -> tuple[set[str], set[str]]:
    """The folders that commit records name, and the tags whose folder is unknown because the record is unreadable."""
    root, taken = open_root(url), set()
    unread = {known[1] for path in files if (known := RECORD.fullmatch(path))}  # damaged records are set aside by tag
    for path in files:
        found = re.fullmatch(r"commits/([^/]+)\.json", path)
        if not found:
            continue
        try:
            with renamed(f"read {url}"):
                taken.add(layout.read_commit(root, found[1])["dir"])
        except CorruptCheckpointError:
            unread.add(found[1])
    return taken, unread


def _is_fenced(entry: Listed, asking: Attempt) -> bool:
    """Whether an uncommitted save belongs to a run that `asking` has fenced. Programs are never fenced."""
    number = _read_number(entry)
    return entry.state == "partial" and number < asking.number and fences(asking.url, number)


def _may_be_alive(url: str, entry: Listed, newest: int) -> bool:
    number = _read_number(entry)
    return entry.state == "partial" and (number >= newest or not fences(url, number))


def _is_unused(url: str, entry: Listed) -> bool:
    """Whether no commit record needs the folder. Reads the record by name, because the listing may be outdated."""
    if not storage.exists(storage.join(url, "commits", f"{entry.tag}.json")):
        return True
    try:
        with renamed(f"read {url}"):
            named = layout.read_commit(open_root(url), entry.tag)["dir"]
    except CorruptCheckpointError:
        return False
    return named != entry.folder and storage.exists(storage.join(url, named, "manifest.json"))


def _read_number(entry: Listed) -> int:
    named = FOLDER.fullmatch(entry.folder)
    assert named
    return int(named["attempt"])


def _find_reason_to_keep(alive: bool, age: float | None, older_than: float) -> str:
    """Why a folder or file may still be needed, or "".

    Older attempts are over once a newer one has begun. The newest one, and a program that is never fenced, may be
    `alive`, but no save pauses for a day.
    """
    if age is None:
        return "its age is unknown"
    limit = max(older_than, DAY) if alive else older_than
    if age >= limit:
        return ""
    return "a running job may still be writing it" if alive else "written too recently"


def _delete(root: str, item: Garbage) -> None:
    if item.kind == "superseded":  # the record first, so that a half-deleted folder never has one
        storage.delete(storage.join(root, "superseded", f"{item.path.rpartition('/')[2].removesuffix('.json')}.json"))
    storage.delete(storage.join(root, item.path))
