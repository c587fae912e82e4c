"""What in a checkpoint root no checkpoint needs, and deleting it: left by killed runs, and by runs that went back.

Imports no torch.

Older runs are fenced, so what they never committed can go when a run begins; what programs left goes a day after its
last write. Kept: a folder whose tag has an unreadable record, or that was set aside as damaged. Listings of object
stores lag, so before a folder is deleted its commit record is asked for by name. Only dsjob's own names are looked at:
the root may be a bucket that others use.
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
PLACES = ("attempts", "commits", "pinned", "superseded")  # folders of a root beside those of saves
# Of storage.write_bytes, and of what convert writes; whole paths.
TEMPORARY = re.compile(r".+\.[0-9a-f]{32}\.tmp|(.+/)?\.[^/]+\.[0-9a-f]{8}\.tmp")
RECORD = re.compile(r"superseded/([^/]+)\.json")  # of a checkpoint that was set aside, by its folder or tag
UNREAD = "the record of its tag is there and cannot be read, or was set aside as damaged"
NEEDED = "the record of its tag names it, or a folder that is not there"


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
    with renamed(f"read {url}"):
        root = find_root(url)[0].root
    found = find_garbage(root, older_than=older_than)
    if not found and not storage.list_names(storage.join(root, "commits")):
        raise NoCheckpointError(f"no checkpoint in {root}", hint="name a run's folder or a checkpoint folder")
    for item in found if not dry_run else ():
        if not item.kept:
            _delete(root, item)
    uploads = 0 if dry_run else storage.abort_uploads(root, hours=max(older_than, DAY) / HOUR)
    return root, found, uploads


def clear(url: str, attempt: Attempt) -> tuple[str, ...]:
    """What a run does when it begins; what of it failed, which is told and no more.

    It deletes what older runs, which are fenced, have never committed, and otherwise what `collect` does; but what was
    set aside is for the user to decide on.
    """

    def delete() -> None:
        for item in find_garbage(url, older_than=HOUR, asking=attempt):
            if not item.kept and item.kind != "superseded":
                _delete(url, item)

    of_saves = lambda path: bool(FOLDER.fullmatch(path.partition("/")[0]))  # noqa: E731
    return noting(delete) + noting(lambda: storage.abort_uploads(url, hours=DAY / HOUR, of=of_saves))


def find_garbage(url: str, *, older_than: float, asking: Attempt | None = None) -> list[Garbage]:
    """What is garbage in a root, with the reason to keep it where there is one.

    `asking`: the run that wants to know: nothing that it has fenced can become a checkpoint any more, however young. It
    looks at nothing but what runs write, while a user who asks means all that is there.
    """
    names, now = storage.list_names(url), time.time()
    files = storage.find_files(url) if asking is None else _list_own(url, names)
    taken, unread = _read_records(url, files)
    unfinished = list_unfinished(names, files, taken)
    newest, found = newest_fencing(url), []
    for entry in unfinished:
        age = None if entry.saved is None else now - entry.saved
        kept = _find_reason_to_keep(_may_be_alive(url, entry, newest), age, older_than)
        if entry.state == "partial" and entry.tag in unread:
            kept = UNREAD
        elif asking is not None and _is_fenced(entry, asking):
            kept = ""
        if entry.state == "partial" and not kept and not _is_loose(url, entry):
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
        elif record and record[1] not in folders | tags:  # its folder is gone, or committed again
            found.append(Garbage("superseded", path, file.size, age, kept))
    return found


def _list_own(url: str, names: Iterable[str]) -> dict[str, storage.Found]:
    """The files of a root that may be a run's: a bucket, or a folder that others use too, may hold any number more.

    names: those in the root.
    """
    files = storage.find_files(url, deep=False)
    for name in names:
        if name in PLACES or FOLDER.fullmatch(name):
            below = storage.find_files(storage.join(url, name))
            files |= {f"{name}/{path}": found for path, found in below.items()}
    return files


def _read_records(url: str, files: Mapping[str, storage.Found]) -> tuple[set[str], set[str]]:
    """The folders that commit records name, and the tags of which it is not known which folder is theirs."""
    root, taken = open_root(url), set()
    unread = {known[1] for path in files if (known := RECORD.fullmatch(path))}  # set aside by tag: damaged
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
    """Whether a save that was never committed is of a run that the one that asks has fenced; programs are not."""
    number = _read_number(entry)
    return entry.state == "partial" and number < asking.number and fences(asking.url, number)


def _may_be_alive(url: str, entry: Listed, newest: int) -> bool:
    number = _read_number(entry)
    return entry.state == "partial" and (number >= newest or not fences(url, number))


def _is_loose(url: str, entry: Listed) -> bool:
    """Asks once more, of the record itself: a listing has no digest, and a folder that is needed must not go."""
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
