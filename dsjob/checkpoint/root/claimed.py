"""The root that a run has claimed: everything that rank 0 changes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsjob.checkpoint.root.attempts import Attempt, Lineage, claim, claim_once
from dsjob.checkpoint.root.catalog import Catalog, noting
from dsjob.checkpoint.root.garbage import clear
from dsjob.checkpoint.root.retention import Retention
from dsjob.errors import DsjobError, FencedError


class ClaimedRoot:
    """A root with the attempt of this run. Only rank 0 may call its methods, so none is a collective.

    Once claimed, every change raises FencedError if a newer run has claimed the root since.
    """

    def __init__(self, catalog: Catalog, retention: Retention, lineage: Lineage, *, single_writer: bool) -> None:
        self._catalog, self._retention, self._single_writer = catalog, retention, single_writer
        self._lineage = lineage
        self._attempt: Attempt | None = None

    def claim(self) -> tuple[str, ...]:
        """Begins a new attempt, and deletes the unfinished saves of older ones. Returns what could not be deleted."""
        self._attempt = claim(self._catalog.url, single_writer=self._single_writer, lineage=self._lineage)
        return clear(self._catalog.url, self._attempt)

    def name_folder(self, tag: str) -> str:
        """The folder for a save. A program that has not called `claim` begins its attempt here."""
        self._attempt = self._attempt or claim_once(self._catalog.url)
        self._attempt.require_newest()
        return self._attempt.name_folder(tag)

    def commit(
        self, folder: str, manifest: dict[str, Any], *, latest: bool, replace: bool, metrics: Mapping[str, float]
    ) -> tuple[str, ...]:
        """Commits a save, then applies retention. Returns what failed after the commit."""
        attempt = self._own()
        notes = self._catalog.commit(folder, manifest, attempt, latest=latest, replace=replace, metrics=metrics)
        notes += noting(lambda: self._catalog.mark_best(self._retention.best))
        notes += noting(lambda: self._catalog.retire(self._retention, attempt))
        return notes

    def rate(self, tag: str, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a checkpoint, then applies retention."""
        attempt = self._own()
        self._catalog.rate(tag, metrics, attempt)
        self._catalog.mark_best(self._retention.best)
        self._catalog.retire(self._retention, attempt)

    def discard(self, tag: str, folder: str) -> None:
        """Deletes a failed save. Raises FencedError if a newer run has begun, which may be why it failed."""
        attempt = self._own()
        try:
            self._catalog.discard(tag, folder)
            attempt.require_newest()
        except FencedError:
            raise
        except DsjobError:  # likely the same cause as the failed save; the next run deletes what is left
            pass

    def list_others(self) -> list[str]:
        """The tags of checkpoints that other runs have saved. They stay."""
        own = self._own()
        records = [] if own.everything else self._catalog.records()
        return [record["tag"] for record in records if not own.owns(record["attempt"])]

    def set_aside(self, *, newer_than: int) -> None:
        """See Catalog.set_aside."""
        self._catalog.set_aside(newer_than, self._attempt)

    def set_aside_damaged(self, tags: Sequence[str]) -> None:
        """See Catalog.set_aside_damaged."""
        self._catalog.set_aside_damaged(tags, self._attempt)

    def _own(self) -> Attempt:
        assert self._attempt is not None  # a save has named its folder first
        return self._attempt
