"""Attempts: the numbered runs of a job in one checkpoint root. Only the newest one may commit checkpoints.

A run claims the next number by creating `attempts/a0003.json` exclusively, before it reads any checkpoint. From then
on, older runs are fenced: one that was believed dead and wakes up finds the newer record, and may not commit.

A save checks for a newer attempt before it writes its commit record, and again afterwards. So a newer run has seen
every commit that was reported as saved. If an older process was paused between check and commit, its commit is not
reported, and the newer run sets it aside. Programs that call `save_checkpoint` have one attempt per process, and fence
no one.

Attempts of the same run have the same `run` in their records: an attempt continues the newest one that comes from the
same document, or that the user has named. Only checkpoints of its own run may be deleted by an attempt: a document may
name the root of any run.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import encode_json
from dsjob.errors import CheckpointError, FencedError, StorageError

# For fullmatch: the folder of a save, such as step-00000120-a0003, or step-00000120-a0003.2 for a second try.
FOLDER = re.compile(r"(?P<tag>.+)-a(?P<attempt>\d{4,})(\.\d+)?")
_RECORD = re.compile(r"a(\d{4,})\.json")
_TRIES = 100
_UNKNOWN_RUN = ""  # that of attempts from before their records named a run
_SINGLE_WRITER = "set checkpoint.single_writer=true if no two runs ever write there at once, or use another store"
_own: dict[str, Attempt] = {}  # this process's attempts, by root


@dataclass(frozen=True)
class Lineage:
    """Which attempts in a root a new one continues.

    file: the path or URL of its document. run_dir: the run's folder. resumed: the user has named run_dir. everything:
    all attempts, because the user has named the root, or has written the job on the command line or in a program.
    """

    file: str | None = None
    run_dir: str = ""
    resumed: bool = False
    everything: bool = True

    def includes(self, record: Mapping[str, Any]) -> bool:
        """Whether the attempt with this record is continued."""
        same = self.file is not None and record.get("file") == self.file
        return self.everything or same or (self.resumed and record.get("run_dir") == self.run_dir)


@dataclass
class Attempt:
    """A claimed attempt, whose number no other run in the root `url` has.

    exclusive: commit records are created exclusively. seen: the tags that were committed when the attempt began; None
    if it does not fence others. run: that of its record; everything: see `Lineage`.
    """

    url: str
    number: int
    exclusive: bool
    seen: frozenset[str] | None = None
    run: str = ""
    everything: bool = True
    _saves: dict[str, int] = field(default_factory=dict)
    _runs: dict[int, str] = field(default_factory=dict)

    def owns(self, number: int) -> bool:
        """Whether an attempt in the root belongs to this run, so that this one may delete its checkpoints."""
        if self.everything or number == self.number:
            return True
        if number not in self._runs:
            self._runs[number] = str(_read_record(self.url, number).get("run", _UNKNOWN_RUN))
        return self._runs[number] == self.run

    def name_folder(self, tag: str) -> str:
        """A new folder name for a save of `tag`. No save has used it before."""
        # A program may save the same tag again (replace). Folders are never reused, so the old one stays valid until
        # the commit.
        count = self._saves[tag] = self._saves.get(tag, 0) + 1
        return f"{tag}-a{self.number:04d}" + (f".{count}" if count > 1 else "")

    def require_newest(self) -> None:
        """Raises FencedError if a newer run of the job has begun. Does nothing for attempts that do not fence."""
        if self.seen is None:
            return
        # Skip the records of programs that do not fence: only a newer run of the job ends this one.
        newer = next((n for n in _list_claimed(self.url) if n > self.number and fences(self.url, n)), None)
        if newer is not None:
            raise FencedError(
                f"a newer run of this job has started in {self.url} (attempt {newer}); this run (attempt {self.number})"
                " can no longer save there",
                hint="stop this run and keep the newer one; to run two jobs at once, give each its own checkpoint.dir",
            )


def claim(url: str, *, single_writer: bool = False, fences: bool = True, lineage: Lineage = Lineage()) -> Attempt:
    """Claims the next number in the root `url`. Raises CheckpointError if the store cannot create files exclusively,
    unless the user has promised a `single_writer`."""
    storage.make_folder(storage.join(url, "attempts"))
    storage.sync_folder(url)
    run = _find_run(url, lineage) if fences else _UNKNOWN_RUN
    whose = {"run": run, "file": lineage.file, "run_dir": lineage.run_dir} if fences else {}
    for _ in range(_TRIES):
        # Two runs may pick the same number. Exclusive creation decides who gets it; the loser tries the next one.
        number = newest_attempt(url) + 1
        record = storage.join(url, "attempts", f"a{number:04d}.json")
        try:
            storage.create_bytes(
                record, encode_json({**_describe(number, fences), **whose}), exclusive=not single_writer
            )
        except FileExistsError:
            continue
        except StorageError as error:
            if not _knows_no_creation(error):
                raise
            what = f"the store of {url} does not support exclusive file creation ({error.message})"
            raise CheckpointError(what, hint=_SINGLE_WRITER) from error
        # Some stores ignore the condition and silently overwrite the file. A second creation, which must fail, detects
        # that.
        if not single_writer and not creates_once(record):
            storage.delete(record)  # otherwise it would fence a run that is the only one there
            what = f"the store of {url} ignores exclusive file creation: two runs could commit the same checkpoint"
            raise CheckpointError(what, hint=_SINGLE_WRITER)
        # List twice: if an incomplete listing missed a tag, it would look like a later commit of a fenced run.
        tags = _list_tags(url) | _list_tags(url) if fences else None
        attempt = _own[url] = Attempt(url, number, not single_writer, tags, run, lineage.everything)
        return attempt
    raise CheckpointError(f"could not claim an attempt in {url}: other runs were faster {_TRIES} times")


def _find_run(url: str, lineage: Lineage) -> str:
    """The run that a new attempt continues: that of the newest one in its lineage. A new one if there is none."""
    for number in sorted({*_list_claimed(url), *_list_numbers(url)}, reverse=True):
        record = _read_record(url, number)
        if record.get("fences") is not False and ("run" not in record or lineage.includes(record)):
            return str(record.get("run", _UNKNOWN_RUN))
    return uuid.uuid4().hex


def claim_once(url: str) -> Attempt:
    """This process's attempt in `url`, for a program that calls `save_checkpoint`. It fences no one."""
    return _own.get(url) or claim(url, fences=False)


def newest_attempt(url: str) -> int:
    """The greatest number claimed in `url`, or 0."""
    # Folders count too: a run of an older version, without a record, may have used their numbers.
    return max([*_list_claimed(url), *_list_numbers(url)], default=0)


def newest_fencing(url: str) -> int:
    """The greatest number of an attempt in `url` that fences older ones, or 0."""
    numbers = sorted({*_list_claimed(url), *_list_numbers(url)}, reverse=True)
    return next((number for number in numbers if fences(url, number)), 0)


def fences(url: str, number: int) -> bool:
    """Whether an attempt fences older ones, as a run of a job does. If its record does not say, it does."""
    return _read_record(url, number).get("fences") is not False


def _read_record(url: str, number: int) -> dict[str, Any]:
    """The record of an attempt; empty if it is damaged, or missing."""
    try:
        found = json.loads(storage.read_bytes(storage.join(url, "attempts", f"a{number:04d}.json")))
    except StorageError as error:
        # A folder has the number, but there is no record: it predates records. Assuming a fence is safe.
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def creates_once(url: str) -> bool:
    """Whether the store refuses to create the existing file `url` again. If it does not, this overwrites the file."""
    try:
        # Other content than the record: a store that overwrites must not go unnoticed because nothing changed.
        storage.create_bytes(url, uuid.uuid4().bytes)
    except FileExistsError:
        return True
    except StorageError as error:
        if not _knows_no_creation(error):
            raise
    return False


def _knows_no_creation(error: StorageError) -> bool:
    """Whether this error means that the file system does not support exclusive creation at all."""
    return isinstance(error.__cause__, (NotImplementedError, TypeError, ValueError))


def _describe(number: int, fences: bool) -> dict[str, Any]:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    who = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "id": uuid.uuid4().hex}
    return {"format": layout.FORMAT, "version": layout.VERSION, "attempt": number, "fences": fences, **who}


def _list_claimed(url: str) -> list[int]:
    names = storage.list_names(storage.join(url, "attempts"))
    return [int(found[1]) for name in names if (found := _RECORD.fullmatch(name))]


def _list_numbers(url: str) -> list[int]:
    """The attempt numbers in folder names. Old checkpoint roots have them only there, without records."""
    return [int(found["attempt"]) for name in storage.list_names(url) if (found := FOLDER.fullmatch(name))]


def _list_tags(url: str) -> frozenset[str]:
    names = storage.list_names(storage.join(url, "commits"))
    return frozenset(name[:-5] for name in names if name.endswith(".json"))
