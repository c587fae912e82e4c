"""Attempts: the incarnations of a job below one checkpoint root, numbered, of which the newest alone may commit.

A run of a job claims the next number by creating `attempts/a0003.json` exclusively, before it reads what is there. From
then on older runs are fenced: one that wakes up after it was given up finds the newer record and may not commit.

A save asks before its commit record and once more after it whether a newer attempt was claimed, so a newer run has
seen every commit that was reported. A commit that it has not seen (of a process that was paused between the two) it
sets aside. Programs that call `save_checkpoint` have one attempt a process and fence nobody.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import encode_json
from dsjob.errors import CheckpointError, FencedError, StorageError

# The folder of one attempt to save; whole names.
FOLDER = re.compile(r"(?P<tag>.+)-a(?P<attempt>\d{4,})(\.\d+)?")
_RECORD = re.compile(r"a(\d{4,})\.json")
_TRIES = 100
_SINGLE_WRITER = "set checkpoint.single_writer=true if no two runs ever write there at once, or use another store"
_own: dict[str, Attempt] = {}  # of this process, by root


@dataclass
class Attempt:
    """A number that no other run has below `url`.

    `exclusive`: creations are refused there where a file exists; `seen`: the tags that were committed when it began,
    None where it does not fence others.
    """

    url: str
    number: int
    exclusive: bool
    seen: frozenset[str] | None = None
    _saves: dict[str, int] = field(default_factory=dict)

    def name_folder(self, tag: str) -> str:
        """A folder for a save of `tag`, whose name was never given before."""
        count = self._saves[tag] = self._saves.get(tag, 0) + 1
        return f"{tag}-a{self.number:04d}" + (f".{count}" if count > 1 else "")

    def require_newest(self) -> None:
        """Raises FencedError where a newer run of a job has begun; only a job's own runs ask."""
        if self.seen is None:
            return
        # Records of programs that fence nobody are passed over: only another run of the job ends this one.
        newer = next((n for n in _list_claimed(self.url) if n > self.number and fences(self.url, n)), None)
        if newer is not None:
            raise FencedError(
                f"a newer run of this job (attempt {newer}) has begun in {self.url}: this one (attempt {self.number})"
                " may not save there any more",
                hint="let the newer one go on, and end this one; two jobs need a checkpoint.dir each",
            )


def claim(url: str, *, single_writer: bool = False, fences: bool = True) -> Attempt:
    """Claims the next number below `url`. Raises CheckpointError where the store cannot tell who was first, unless the
    user has said that there is a `single_writer`."""
    storage.make_folder(storage.join(url, "attempts"))
    storage.sync_folder(url)
    for _ in range(_TRIES):
        # Two runs may pick the same number; the exclusive creation decides, and the loser takes the next one.
        number = newest_attempt(url) + 1
        record = storage.join(url, "attempts", f"a{number:04d}.json")
        try:
            storage.create_bytes(record, encode_json(_describe(number, fences)), exclusive=not single_writer)
        except FileExistsError:
            continue
        except StorageError as error:
            if not _knows_no_creation(error):
                raise
            what = f"the store of {url} cannot create a file only where there is none ({error.message})"
            raise CheckpointError(what, hint=_SINGLE_WRITER) from error
        # Some stores ignore the condition and silently overwrite: only a second creation, which must fail, shows that.
        if not single_writer and not creates_once(record):
            storage.delete(record)  # what is left of it would fence a run that is alone there
            what = f"the store of {url} lets a file be created twice: two runs could commit the same checkpoint there"
            raise CheckpointError(what, hint=_SINGLE_WRITER)
        # Twice: a tag that one answer loses on its way would be taken for what a fenced run commits later.
        tags = _list_tags(url) | _list_tags(url) if fences else None
        attempt = _own[url] = Attempt(url, number, not single_writer, tags)
        return attempt
    raise CheckpointError(f"could not claim an attempt in {url}: others were faster {_TRIES} times")


def claim_once(url: str) -> Attempt:
    """This process's attempt below `url`, for a program that saves now and then, and fences nobody."""
    return _own.get(url) or claim(url, fences=False)


def newest_attempt(url: str) -> int:
    """The greatest number that was claimed below `url`; 0 where there is none."""
    return max([*_list_claimed(url), *_list_numbers(url)], default=0)


def newest_fencing(url: str) -> int:
    """The same of those that fence older ones; 0 where there is none."""
    numbers = sorted({*_list_claimed(url), *_list_numbers(url)}, reverse=True)
    return next((number for number in numbers if fences(url, number)), 0)


def fences(url: str, number: int) -> bool:
    """Whether an attempt is a run of a job, which fences older ones; where its record does not say so, it is."""
    try:
        found = json.loads(storage.read_bytes(storage.join(url, "attempts", f"a{number:04d}.json")))
    except StorageError as error:
        # No record, but a number: a folder from before records existed. Assuming a fence is the safe side.
        if isinstance(error.__cause__, FileNotFoundError):
            return True
        raise
    except (ValueError, RecursionError):
        return True
    return not isinstance(found, dict) or found.get("fences") is not False


def creates_once(url: str) -> bool:
    """Whether a second creation of the existing file `url` is refused there. Where it is not, the file is changed."""
    try:
        storage.create_bytes(url, uuid.uuid4().bytes)
    except FileExistsError:
        return True
    except StorageError as error:
        if not _knows_no_creation(error):
            raise
    return False


def _knows_no_creation(error: StorageError) -> bool:
    """Whether this is how a file system refuses `create_bytes` that has nothing of the kind."""
    return isinstance(error.__cause__, (NotImplementedError, TypeError, ValueError))


def _describe(number: int, fences: bool) -> dict[str, Any]:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    who = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "id": uuid.uuid4().hex}
    return {"format": layout.FORMAT, "version": layout.VERSION, "attempt": number, "fences": fences, **who}


def _list_claimed(url: str) -> list[int]:
    names = storage.list_names(storage.join(url, "attempts"))
    return [int(found[1]) for name in names if (found := _RECORD.fullmatch(name))]


def _list_numbers(url: str) -> list[int]:
    """Those of folders: before there were records of attempts, they alone had the numbers."""
    return [int(found["attempt"]) for name in storage.list_names(url) if (found := FOLDER.fullmatch(name))]


def _list_tags(url: str) -> frozenset[str]:
    names = storage.list_names(storage.join(url, "commits"))
    return frozenset(name[:-5] for name in names if name.endswith(".json"))
