"""The committed checkpoints below one URL: finding, committing, retiring. No tensors and no ranks here.

A folder without a commit record does not exist. A commit record is created exclusively, written last and deleted first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import encode_file
from dsjob.checkpoint.root.attempts import FOLDER, Attempt, fences
from dsjob.checkpoint.root.retention import Retention
from dsjob.checkpoint.root.source import open_root, renamed
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError, FencedError, StorageError

_SCRIPT = "zero_to_fp32.py"
_STEP = re.compile(r"step-(\d{8,})")  # a job's tag


class Catalog:
    """The checkpoints of one root folder (a path or URL)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._has_script = False
        self._uncertain: set[str] = set()  # folders whose commit record may yet appear in an object store

    def find(self, tag: str | None) -> dict[str, Any]:
        """The commit record of a tag, or of the newest checkpoint. Raises NoCheckpointError."""
        with renamed(f"read {self.url}"):
            return layout.find_commit(open_root(self.url), tag)

    def follow_latest(self) -> tuple[str | None, str]:
        """The committed tag that the file `latest` names, and nothing to tell; or None, and why the newest counts.

        Where nothing is committed there is nothing to tell.
        """
        tags = self._tags()
        if not tags:
            return None, ""
        url = storage.join(self.url, "latest")
        try:
            if not storage.exists(url):
                return None, "there is no file `latest`: the newest checkpoint is loaded"
            named = storage.read_text(url, layout.MAX_RECORD).strip()
        except StorageError as error:
            return None, f"{error.message}: the newest checkpoint is loaded"
        if named in tags:
            return named, ""
        return None, f"{url} names {named[:80]!r}, which was never committed: the newest checkpoint is loaded"

    def records(self) -> list[dict[str, Any]]:
        """The commit records in the order of their steps, without those that cannot be read or contradict themselves,
        which `tags` has too: no digest covers them, and what is deleted is decided by them."""
        root, records = open_root(self.url), []
        for tag in self._tags():
            try:
                with renamed(f"read {self.url}"):
                    record = layout.read_commit(root, tag)
            except CorruptCheckpointError:
                continue
            if _is_consistent(record):
                records.append(record)
        return sorted(records, key=lambda record: int(record["step"]))

    def commit(
        self,
        folder: str,
        manifest: Mapping[str, Any],
        attempt: Attempt,
        *,
        latest: bool,
        replace: bool = False,
        metrics: Mapping[str, float] | None = None,
        saved: float | None = None,
    ) -> tuple[str, ...]:
        """Writes the manifest and makes the folder a checkpoint; what of the rest failed once it was one.

        `saved`: of a copy, when the checkpoint itself was saved, in seconds since 1970. Where the tag is taken: with
        `replace`, the new checkpoint takes the place of the old one at once, whose folder is then deleted; else
        CheckpointError. Raises FencedError where a newer attempt has begun.
        """
        place = storage.join(self.url, folder, "manifest.json")
        text = encode_file(manifest, place, layout.MAX_MANIFEST)
        storage.write_bytes(place, text)
        tag = manifest["tag"]
        record = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "tag": tag,
            "step": manifest["step"],
            "attempt": attempt.number,
            "dir": folder,
            "manifest_sha256": hashlib.sha256(text).hexdigest(),
            **({"metrics": dict(metrics)} if metrics else {}),
            **({"saved": saved} if saved is not None else {}),
        }
        text = encode_file(record, self._commit_url(tag), layout.MAX_RECORD)
        storage.make_folder(self._commit_url())
        storage.sync_folder(self.url)
        # Asked as late as possible: shards may have taken minutes, in which a newer run may have begun.
        attempt.require_newest()
        before = self.find(tag)["dir"] if replace and storage.exists(self._commit_url(tag)) else None
        try:
            if before is not None:
                storage.write_bytes(self._commit_url(tag), text)
            else:
                self._create_record(tag, text, attempt)
        except StorageError as error:
            # `discard` then leaves the folder: deleting it could turn a late commit into a damaged checkpoint.
            if not storage.is_local(self.url) and not _is_refused(error):  # without answer it may be carried out yet
                self._uncertain.add(folder)
            raise
        try:
            # Whoever began in between may not have seen the record: it sets it aside, and so this one is not saved.
            attempt.require_newest()
        except FencedError:
            noting(lambda: self._withdraw(tag, folder))
            raise
        # From here on the checkpoint is saved: what fails below is noted and raises nothing.
        old = before not in (None, folder)
        notes = noting(lambda: storage.delete(storage.join(self.url, str(before)))) if old else ()
        return notes + noting(lambda: self._write_latest(tag) if latest else None) + noting(self._write_script)

    def rate(self, tag: str, metrics: Mapping[str, float], attempt: Attempt) -> None:
        """Adds `metrics` to the commit record of a checkpoint that `attempt` has made. Raises FencedError."""
        attempt.require_newest()
        record = {**self.find(tag), **({"metrics": dict(metrics)} if metrics else {})}
        storage.write_bytes(self._commit_url(tag), encode_file(record, self._commit_url(tag), layout.MAX_RECORD))

    def _write_latest(self, tag: str) -> None:
        storage.write_bytes(storage.join(self.url, "latest"), f"{tag}\n".encode())

    def _write_script(self) -> None:
        """Puts this dsjob's script in the place of another, but for one that reads later versions of the format."""
        if self._has_script:
            return
        place = storage.join(self.url, _SCRIPT)
        own = resources.files("dsjob.checkpoint.format").joinpath(_SCRIPT).read_bytes()
        there = storage.read_bytes(place) if storage.exists(place) else b""
        found = re.search(rb'^FORMAT, VERSION = "[a-z-]+", (\d{1,9})$', there, re.MULTILINE)
        if there != own and not (found and int(found[1]) > layout.VERSION):
            storage.write_bytes(place, own)
        self._has_script = True

    def _withdraw(self, tag: str, folder: str) -> None:
        """Deletes the record of a fenced run whose folder the newer one has cleared away before the record was there:
        that one is nobody's checkpoint, and would be taken for a damaged one."""
        if self.find(tag)["dir"] == folder and not storage.exists(storage.join(self.url, folder, "manifest.json")):
            storage.delete(self._commit_url(tag))

    def _create_record(self, tag: str, text: bytes, attempt: Attempt) -> None:
        try:
            storage.create_bytes(self._commit_url(tag), text, exclusive=attempt.exclusive)
        except FileExistsError:
            attempt.require_newest()  # it may be a newer run's, which is the better answer
            if _is_stray(self.find(tag), attempt):
                self._set_aside(self.find(tag))
                self._create_record(tag, text, attempt)
                return
            raise CheckpointError(
                f"{self.url} holds a checkpoint {tag} already", hint="save to another folder: checkpoint.dir=..."
            ) from None

    def discard(self, tag: str, folder: str) -> None:
        """Deletes what a failed save left, so that a full disk has its space back; never what is or may yet become a
        checkpoint."""
        if folder in self._uncertain:
            return
        if not storage.exists(self._commit_url(tag)) or self.find(tag)["dir"] != folder:
            storage.delete(storage.join(self.url, folder))

    def retire(self, retention: Retention, attempt: Attempt | None = None) -> None:
        """Deletes the checkpoints that `retention` lets go, and sets aside those of fenced attempts.

        Raises FencedError where `attempt` is fenced itself: what is there is then the newer run's.
        """
        if attempt is not None:
            attempt.require_newest()
        records: list[Mapping[str, Any]] = []
        for record in self.records():
            if attempt is not None and _is_stray(record, attempt):
                self._set_aside(record)
            else:
                records.append(record)
        for old in retention.expired(records, storage.list_names(storage.join(self.url, "pinned"))):
            if attempt is not None:  # time may have passed: a newer run may need what is old to this one
                attempt.require_newest()
            # The record first: a crash in between leaves a folder that does not count, never a record without a folder.
            storage.delete(self._commit_url(old["tag"]))
            storage.delete(storage.join(self.url, old["dir"]))

    def tags(self) -> list[str]:
        """The tags of all checkpoints, the newest first; one whose record cannot be read comes where its name says."""
        root = open_root(self.url)

        def read_step(tag: str) -> int:
            if found := _STEP.fullmatch(tag):
                return int(found[1])
            try:
                return int(layout.read_commit(root, tag)["step"])
            except layout.Damaged:
                return -1

        with renamed(f"read {self.url}"):
            return sorted(self._tags(), key=lambda tag: (read_step(tag), tag), reverse=True)

    def set_aside_damaged(self, tags: Sequence[str], attempt: Attempt | None = None) -> None:
        """Moves the commit records of checkpoints that cannot be read out of the way; their folders stay.

        Raises FencedError where `attempt` is fenced; what a newer one has committed stays where it is.
        """
        if attempt is not None:
            attempt.require_newest()
        newer = {record["tag"] for record in self.records() if _is_newer(record, attempt)}
        for tag in tags:
            if tag not in newer:
                self._set_aside({"tag": tag, "dir": tag})

    def set_aside(self, newer_than: int, attempt: Attempt | None = None) -> None:
        """The same of later steps, for a run that goes back."""
        if attempt is not None:
            attempt.require_newest()
        for record in self.records():
            if record["step"] > newer_than and not _is_newer(record, attempt):
                self._set_aside(record)

    def _set_aside(self, record: Mapping[str, Any]) -> None:
        text = storage.read_bytes(self._commit_url(record["tag"]))
        storage.make_folder(storage.join(self.url, "superseded"))
        storage.write_bytes(storage.join(self.url, "superseded", f"{record['dir']}.json"), text)
        storage.delete(self._commit_url(record["tag"]))

    def _tags(self) -> list[str]:
        return [name[:-5] for name in storage.list_names(self._commit_url()) if name.endswith(".json")]

    def _commit_url(self, tag: str | None = None) -> str:
        return storage.join(self.url, "commits", *([f"{tag}.json"] if tag else []))


def noting(action: Callable[[], object]) -> tuple[str, ...]:
    """Does what is left to do for a checkpoint that is committed, and so saved: what fails of that is told, no more."""
    try:
        action()
    except DsjobError as error:
        return (error.message,)
    return ()


def _is_refused(error: BaseException | None) -> bool:
    """Whether a store has answered that it does not do it, and so never will: a status of 4xx, as its library has it.

    Those that say "later", or that it is there already, tell nothing: it may have been this very request.
    """
    while error is not None:
        if error.__context__ not in (None, error.__cause__) and not _is_refused(error.__context__):
            return False  # it is of reading back what became of another request
        answer = getattr(error, "response", None)
        told = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        for status in (told, *(getattr(error, name, None) for name in ("status_code", "status", "code"))):
            if isinstance(status, int) and 400 <= status <= 599:
                return status < 500 and status not in (408, 409, 412, 425, 429)
        error = error.__cause__
    return False


def _is_consistent(record: Mapping[str, Any]) -> bool:
    """Whether what a commit record says twice is the same: the step, as a job's tags have it, and the attempt."""
    step, folder = _STEP.fullmatch(record["tag"]), FOLDER.fullmatch(record["dir"])
    same = folder is not None and int(folder["attempt"]) == record.get("attempt")
    return same and (step is None or int(step[1]) == record["step"])


def _is_newer(record: Mapping[str, Any], attempt: Attempt | None) -> bool:
    number = record.get("attempt")
    return attempt is not None and isinstance(number, int) and number > attempt.number


def _is_stray(record: Mapping[str, Any], attempt: Attempt) -> bool:
    """Whether an older run has committed this after `attempt` had begun."""
    number = record.get("attempt")
    known = attempt.seen is None or record["tag"] in attempt.seen
    return not known and isinstance(number, int) and number < attempt.number and fences(attempt.url, number)
