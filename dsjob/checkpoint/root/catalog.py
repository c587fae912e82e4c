"""Finds, commits and retires the checkpoints of one root. Knows nothing of tensors and ranks.

A folder without a commit record is not a checkpoint. A commit record is created exclusively, written last and deleted
first.
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
from dsjob.checkpoint.root.retention import Best, Retention
from dsjob.checkpoint.root.source import open_root, renamed
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError, FencedError, StorageError

_SCRIPT = "zero_to_fp32.py"
_STEP = re.compile(r"step-(\d{8,})")  # a job's tag


class Catalog:
    """The checkpoints of one root folder (a path or URL)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._has_script = False
        self._marked = ""  # the tag in the file `best`, as far as known
        self._uncertain: set[str] = set()  # folders whose commit record an object store may still create

    def find(self, tag: str | None) -> dict[str, Any]:
        """The commit record of a tag, by default of the newest checkpoint. Raises NoCheckpointError."""
        with renamed(f"read {self.url}"):
            return layout.find_commit(open_root(self.url), tag)

    def follow_latest(self) -> tuple[str | None, str]:
        """The committed tag in the file `latest`, and "". If it is unusable: None, and a note that the newest
        checkpoint is loaded instead, or "" if there are no checkpoints at all."""
        tags = self._tags()
        if not tags:
            return None, ""
        url = storage.join(self.url, "latest")
        try:
            if not storage.exists(url):
                return None, "there is no file `latest`; loading the newest checkpoint"
            named = storage.read_text(url, layout.MAX_RECORD).strip()
        except StorageError as error:
            return None, f"{error.message}; loading the newest checkpoint"
        if named in tags:
            return named, ""
        return None, f"{url} names {named[:80]!r}, which was never committed; loading the newest checkpoint"

    def records(self) -> list[dict[str, Any]]:
        """The readable and consistent commit records, in the order of their steps. (`tags` includes the others.)

        No digest protects commit records, and they decide what is deleted, so damaged ones must not take part.
        """
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
        """Writes the manifest, then the commit record: from then on, the folder is a checkpoint. Returns what failed
        afterwards.

        saved: for a copy, when the original was saved, in seconds since 1970. If the tag exists: with `replace`, the
        new checkpoint replaces the old one atomically, and the old folder is then deleted; otherwise this raises
        CheckpointError. Raises FencedError if a newer attempt has begun.
        """
        place = storage.join(self.url, folder, "manifest.json")
        text = encode_file(manifest, place, layout.MAX_MANIFEST)
        storage.write_bytes(place, text)
        # The manifest is durable before the record names it by its digest.
        tag = manifest["tag"]
        record = {
            **_describe(manifest, folder, attempt),
            "manifest_sha256": hashlib.sha256(text).hexdigest(),
            **({"metrics": dict(metrics)} if metrics else {}),
            **({"saved": saved} if saved is not None else {}),
        }
        text = encode_file(record, self._commit_url(tag), layout.MAX_RECORD)
        storage.make_folder(self._commit_url())
        storage.sync_folder(self.url)
        # Check as late as possible: writing the shards may have taken minutes, and a newer run may have begun.
        attempt.require_newest()
        # The folder of the checkpoint that is replaced. It stays until the new record is durable.
        before = self.find(tag)["dir"] if replace and storage.exists(self._commit_url(tag)) else None
        try:
            if before is not None:
                storage.write_bytes(self._commit_url(tag), text)
            else:
                self._create_record(tag, text, attempt)
        except StorageError as error:
            # Without an answer, the object store may still carry out the request. `discard` must then leave the folder:
            # deleting it could turn a late commit into a damaged checkpoint.
            if not storage.is_local(self.url) and not _is_refused(error):
                self._uncertain.add(folder)
            raise
        try:
            # A run that began in the meantime may not have seen the record, and will set it aside. So do not report
            # this checkpoint as saved.
            attempt.require_newest()
        except FencedError:
            noting(lambda: self._withdraw(tag, folder))
            raise
        # From here on the checkpoint is saved, so failures below become notes rather than errors.
        old = before not in (None, folder)
        notes = noting(lambda: storage.delete(storage.join(self.url, str(before)))) if old else ()
        return notes + noting(lambda: self._write_latest(tag) if latest else None) + noting(self._write_script)

    def rate(self, tag: str, metrics: Mapping[str, float], attempt: Attempt) -> None:
        """Adds `metrics` to the commit record of a checkpoint that `attempt` saved. Raises FencedError."""
        attempt.require_newest()
        record = {**self.find(tag), **({"metrics": dict(metrics)} if metrics else {})}
        storage.write_bytes(self._commit_url(tag), encode_file(record, self._commit_url(tag), layout.MAX_RECORD))

    def mark_best(self, best: Best | None) -> None:
        """Writes the tag of the best checkpoint into the file `best`, if there is one."""
        chosen = best.choose(self.records()) if best is not None else []
        # Written only when it changes: on an object store, each write is a request.
        if chosen and chosen[0]["tag"] != self._marked:
            self._marked = str(chosen[0]["tag"])
            storage.write_bytes(storage.join(self.url, "best"), f"{self._marked}\n".encode())

    def _write_latest(self, tag: str) -> None:
        storage.write_bytes(storage.join(self.url, "latest"), f"{tag}\n".encode())

    def _write_script(self) -> None:
        """Writes zero_to_fp32.py into the root, unless the one there reads a later version of the format."""
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
        """Deletes the record of a fenced run if the newer run deleted its folder just before the record was created.
        Otherwise, the record would look like a damaged checkpoint."""
        if self.find(tag)["dir"] == folder and not storage.exists(storage.join(self.url, folder, "manifest.json")):
            storage.delete(self._commit_url(tag))

    def _create_record(self, tag: str, text: bytes, attempt: Attempt) -> None:
        try:
            storage.create_bytes(self._commit_url(tag), text, exclusive=attempt.exclusive)
        except FileExistsError:
            attempt.require_newest()  # if a newer run created it, FencedError is the more helpful error
            if _is_stray(self.find(tag), attempt):
                self._set_aside(self.find(tag))
                self._create_record(tag, text, attempt)
                return
            raise CheckpointError(
                f"{self.url} already has a checkpoint {tag}", hint="save to another folder: checkpoint.dir=..."
            ) from None

    def discard(self, tag: str, folder: str) -> None:
        """Deletes the folder of a failed save, so that a full disk has space again. Never deletes what is, or may still
        become, a checkpoint."""
        if folder in self._uncertain:
            return
        if not storage.exists(self._commit_url(tag)) or self.find(tag)["dir"] != folder:
            storage.delete(storage.join(self.url, folder))

    def retire(self, retention: Retention, attempt: Attempt | None = None) -> None:
        """Deletes the checkpoints of this run that `retention` does not keep, and sets aside late commits of fenced
        attempts.

        Raises FencedError if `attempt` itself is fenced: the checkpoints then belong to the newer run.
        """
        if attempt is not None:
            attempt.require_newest()
        records: list[Mapping[str, Any]] = []
        for record in self.records():
            if attempt is not None and _is_stray(record, attempt):
                self._set_aside(record)
            elif attempt is None or attempt.owns(record["attempt"]):
                records.append(record)
        for old in retention.expired(records, storage.list_names(storage.join(self.url, "pinned"))):
            if attempt is not None:  # deletions take time; a newer run may have begun, and need these checkpoints
                attempt.require_newest()
            # Delete the record first. A crash in between then leaves a folder that does not count, and never a record
            # without its folder.
            storage.delete(self._commit_url(old["tag"]))
            storage.delete(storage.join(self.url, old["dir"]))

    def tags(self) -> list[str]:
        """The tags of all checkpoints, newest first. If a record is unreadable, the step in its tag decides."""
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
        """Moves the commit records of damaged checkpoints to `superseded`. Their folders stay.

        Leaves what a newer attempt has committed. Raises FencedError if `attempt` is fenced.
        """
        if attempt is not None:
            attempt.require_newest()
        newer = {record["tag"] for record in self.records() if _is_newer(record, attempt)}
        for tag in tags:
            if tag not in newer:
                self._set_aside({"tag": tag, "dir": tag})

    def set_aside(self, newer_than: int, attempt: Attempt | None = None) -> None:
        """Moves the commit records of later steps to `superseded`, for a run that rewinds to the step `newer_than`.

        Raises CheckpointError if another run has saved one of them."""
        if attempt is not None:
            attempt.require_newest()
        later = [one for one in self.records() if one["step"] > newer_than and not _is_newer(one, attempt)]
        if attempt is not None and (others := [one["tag"] for one in later if not attempt.owns(one["attempt"])]):
            hint = "save to another folder (checkpoint.dir), or name this one on the command line: checkpoint.dir=..."
            raise CheckpointError(f"{self.url} has a later checkpoint of another run, {others[-1]}", hint=hint)
        for record in later:
            self._set_aside(record)

    def _set_aside(self, record: Mapping[str, Any]) -> None:
        # Copy the record before deleting it: a crash in between leaves both, and never neither.
        text = storage.read_bytes(self._commit_url(record["tag"]))
        storage.make_folder(storage.join(self.url, "superseded"))
        storage.write_bytes(storage.join(self.url, "superseded", f"{record['dir']}.json"), text)
        storage.delete(self._commit_url(record["tag"]))

    def _tags(self) -> list[str]:
        return [name[:-5] for name in storage.list_names(self._commit_url()) if name.endswith(".json")]

    def _commit_url(self, tag: str | None = None) -> str:
        return storage.join(self.url, "commits", *([f"{tag}.json"] if tag else []))


def noting(action: Callable[[], object]) -> tuple[str, ...]:
    """Runs a step that follows the commit. The checkpoint is saved, so this returns an error as a note."""
    try:
        action()
    except DsjobError as error:
        return (error.message,)
    return ()


def _is_refused(error: BaseException | None) -> bool:
    """Whether a store has definitely refused a request: its library reports an HTTP status of 4xx.

    Statuses that mean "try later" or "exists already" do not count: this very request may have been carried out.
    """
    while error is not None:
        if error.__context__ not in (None, error.__cause__) and not _is_refused(error.__context__):
            return False  # this error is from reading back the result of an earlier request, whose outcome is unknown
        # botocore keeps the status in `response`, other libraries in an attribute.
        answer = getattr(error, "response", None)
        found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        for status in (found, *(getattr(error, name, None) for name in ("status_code", "status", "code"))):
            if isinstance(status, int) and 400 <= status <= 599:
                return status < 500 and status not in (408, 409, 412, 425, 429)
        error = error.__cause__
    return False


def _describe(manifest: Mapping[str, Any], folder: str, attempt: Attempt) -> dict[str, Any]:
    """What a commit record says of every checkpoint."""
    return {
        "format": layout.FORMAT,
        "version": layout.VERSION,
        "tag": manifest["tag"],
        "step": manifest["step"],
        "attempt": attempt.number,
        "dir": folder,
    }


def _is_consistent(record: Mapping[str, Any]) -> bool:
    """Whether a commit record agrees with its names: the step with its tag, the attempt with its folder."""
    step, folder = _STEP.fullmatch(record["tag"]), FOLDER.fullmatch(record["dir"])
    same = folder is not None and int(folder["attempt"]) == record.get("attempt")
    return same and (step is None or int(step[1]) == record["step"])


def _is_newer(record: Mapping[str, Any], attempt: Attempt | None) -> bool:
    number = record.get("attempt")
    return attempt is not None and isinstance(number, int) and number > attempt.number


def _is_stray(record: Mapping[str, Any], attempt: Attempt) -> bool:
    """Whether an older run committed this after `attempt` had begun."""
    number = record.get("attempt")
    known = attempt.seen is None or record["tag"] in attempt.seen
    return not known and isinstance(number, int) and number < attempt.number and fences(attempt.url, number)
