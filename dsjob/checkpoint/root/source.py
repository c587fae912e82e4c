"""Opens checkpoint roots at paths and URLs for the readers in `zero_to_fp32`, and translates their errors."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.errors import CorruptCheckpointError, NoCheckpointError, StorageError, UsageError

BLOCK = 1 << 20  # bytes; smaller reads are served from cached blocks of this size, since each read is a request


def open_root(url: str) -> layout.Folder:
    """The checkpoint root at a path or URL. A root at a URL caches what it reads, so open it again after writing."""
    return layout.Folder(storage.local_path(url)) if storage.is_local(url) else UrlFolder(url)


def find_own_root(url: str) -> layout.Folder | None:
    """The root with checkpoints at a path or URL, or in `checkpoints` below it; None if there is neither."""
    places = (open_root(place) for place in (url, storage.join(url, "checkpoints")))
    return next((place for place in places if place.names("commits")), None)


def find_root(url: str) -> tuple[layout.Folder, str]:
    """The checkpoint root that a path or URL refers to; and if it refers to one step, its tag or folder, else "".

    `url`: a run's folder (with `checkpoints/` in it), a checkpoint root, or one step's tag or folder in a root.
    Raises NothingThere if it is a local path that does not exist.
    """
    if (own := find_own_root(url)) is not None:
        return own, ""
    place, below = open_root(url), open_root(storage.join(url, "checkpoints"))
    head, _, name = place.root.rstrip("/").rpartition("/")
    if name and not head.endswith((":", ":/")):  # do not look above the bucket of a URL
        above = open_root(head or "/")
        if above.names("commits"):
            return above, name
    if storage.is_local(url) and not storage.exists(url):
        raise layout.NothingThere(f"no such folder: {place.root}", "name the folder of a run, or a checkpoint")
    return (below if below.names("") else place), ""


def locate(url: str, tag: str | None = None) -> tuple[layout.Folder, dict[str, Any]]:
    """The checkpoint root that a path or URL refers to (see find_root), and the commit record of `tag`, by default of
    the newest checkpoint."""
    root, name = find_root(url)
    if name and tag:
        raise layout.Refused(f"{url} is already the folder of one step", "omit --tag, or name its parent folder")
    return root, layout.find_commit(root, name or tag)


@contextmanager
def renamed(action: str) -> Iterator[None]:
    """Translates OSError and the errors of zero_to_fp32 to those of `dsjob.errors`."""
    try:
        yield
    except layout.Damaged as error:
        raise CorruptCheckpointError(error.message, hint=error.hint) from error
    except layout.NothingThere as error:
        raise NoCheckpointError(error.message, hint=error.hint) from error
    except layout.Refused as error:
        raise UsageError(error.message, hint=error.hint) from error
    except RecursionError:
        raise CorruptCheckpointError(f"cannot {action}: its JSON is nested too deeply", hint=layout.ELSEWHERE) from None
    except OSError as error:
        raise StorageError(f"cannot {action}: {error}") from error


class UrlFolder(layout.Folder):
    """A checkpoint root at a URL. Large reads are one ranged request each; small ones are served from cached blocks."""

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self.size = functools.lru_cache(maxsize=4096)(self._size)
        self.block = functools.lru_cache(maxsize=64)(self._block)

    def names(self, folder: str) -> list[str]:
        """See Folder."""
        return storage.list_names(storage.join(self.root, folder))

    def open_file(self, name: str) -> io.RawIOBase:
        """See Folder."""
        return _UrlFile(self, name, self.size(name))

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` to `end`, or to the end of the file if that is earlier."""
        return storage.read_bytes(storage.join(self.root, name), start, end)

    def _size(self, name: str) -> int:
        try:
            return storage.size(storage.join(self.root, name))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise FileNotFoundError(error.message) from error
            raise

    def _block(self, name: str, index: int) -> bytes:
        return self.read(name, index * BLOCK, min((index + 1) * BLOCK, self.size(name)))


class _UrlFile(io.RawIOBase):
    """A seekable, read-only file of a UrlFolder."""

    def __init__(self, folder: UrlFolder, name: str, size: int) -> None:
        self.folder, self.name, self.length, self.position = folder, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self.length - self.position))
        if count >= BLOCK:
            data = self.folder.read(self.name, self.position, self.position + count)[:count]
        elif count:
            index, start = divmod(self.position, BLOCK)
            data = self.folder.block(self.name, index)[start : start + count]
        else:
            data = b""
        view[: len(data)] = data
        self.position += len(data)
        return len(data)
