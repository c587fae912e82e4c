"""A checkpoint root at any URL, for the readers of `zero_to_fp32`; and their errors in the project's own names."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as layout
from dsjob.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError


class UrlFolder(layout.Folder):
    """A checkpoint root, read through `storage`."""

    def __init__(self, url: str) -> None:
        self.root = url

    def names(self, folder: str) -> list[str]:
        return storage.list_names(storage.join(self.root, folder))

    def open_file(self, name: str) -> io.RawIOBase:
        url = storage.join(self.root, name)
        if not storage.exists(url):
            raise FileNotFoundError(url)
        return cast(io.RawIOBase, storage.open_read(url))


@contextmanager
def renamed() -> Iterator[None]:
    """Renames what `zero_to_fp32` raises."""
    try:
        yield
    except layout.Damaged as error:
        raise CorruptCheckpointError(error.message, hint=error.hint) from error
    except layout.NothingThere as error:
        raise NoCheckpointError(error.message, hint=error.hint) from error
    except layout.Problem as error:
        raise CheckpointError(error.message, hint=error.hint) from error
