"""Reads and writes files at paths and URLs. The only module that uses fsspec; everything dsjob stores goes through it.

A URL is a plain string: a local path, or `scheme://...` with a protocol that `locations` allows. It is never a `Path`,
which would turn `s3://` into `s3:/`. Errors of file systems become `StorageError`. The library of each store finds its
own credentials.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec

from dsjob import files
from dsjob.contract.access import explain_place
from dsjob.contract.locations import shorten
from dsjob.contract.secrets import describe_secret, redact
from dsjob.errors import DsjobError, StorageError

_BEHIND = 32 << 20  # write to disk whenever this many bytes are waiting
_PATIENCE, _BLOCK = 15, 1 << 16  # for a document from the web: seconds in total, bytes per read
_FREE = "free some space, or choose a folder on another disk"
_ADVICE = {EFBIG: _FREE, ENOSPC: _FREE, EDQUOT: _FREE, EROFS: "choose a folder that you can write to"}
_CONFLICTS = 5  # tries to create a file while another creation of the same file is in progress


@contextmanager
def _renamed(action: str, url: str, passing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turns the errors of file systems into StorageError, except those in `passing`."""
    try:
        yield
    except DsjobError:
        raise
    except passing:
        raise
    except PermissionError as error:
        detail = "permission denied" if is_local(url) else f"permission denied: {error}"
        raise _make_error(action, url, detail, "choose a folder that you can write to") from error
    except FileNotFoundError as error:
        bucket = "bucket" in str(error).lower()
        detail = "the bucket does not exist" if bucket else "no such file or folder"
        hint = "dsjob does not create buckets: create it, or correct its name" if bucket else ""
        raise _make_error(action, url, detail, hint) from error
    except NotADirectoryError as error:
        raise _make_error(action, url, "part of this path is a file, not a folder", "choose another path") from error
    except OSError as error:
        raise _make_error(action, url, error.strerror or str(error), _ADVICE.get(error.errno or 0, "")) from error
    except Exception as error:  # stores' libraries have many types for missing credentials, no connection, no answer
        if is_local(url):
            raise
        raise _make_error(action, url, f"{type(error).__name__}: {error}") from error


def _make_error(action: str, url: str, detail: str, hint: str = "") -> StorageError:
    return StorageError(redact(f"cannot {action} {url}: {detail}"), hint=hint)


def _open_file_system(url: str, *, write: bool = False) -> tuple[Any, str]:
    if secret := describe_secret(url):
        hint = "remove it: credentials come from the environment, or from the profile of the store's own tools"
        raise StorageError(f"cannot open {redact(url)}: {secret}", hint=hint)
    _require_open(url, url, write=write)
    # Cached listings of object stores would miss files that this process has just written.
    options = {} if is_local(url) or url.startswith("memory:") else {"use_listings_cache": False}
    try:
        if b"\0" in os.fsencode(url):
            raise ValueError("a path cannot contain NUL")
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url, **options))
    except (ImportError, ValueError) as error:  # an unknown protocol, a missing package, or an invalid path
        raise StorageError(redact(f"cannot open {url}: {error}")) from error


def _require_open(url: str, place: str, *, write: bool = False) -> None:
    """Raises StorageError if `place`, to which `url` leads, may not be opened."""
    _, refusal, hint = explain_place(place, write=write)
    if refusal:
        raise StorageError(f"cannot open {shorten(url)}: {refusal}", hint=hint)


def is_local(url: str) -> bool:
    """Whether `url` names a place on this machine's own file system."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """The path of a local URL."""
    return os.path.expanduser(url.split("://", 1)[1] if "://" in url else url)


def join(url: str, *names: str) -> str:
    """`url` with `names` below it."""
    root = url if url.endswith("://") else url.rstrip("/") + "/"
    return root + "/".join(names)


def exists(url: str) -> bool:
    """Whether a file or folder exists. Raises StorageError if that cannot be determined."""
    with _renamed("look at", url):
        fs, path = _open_file_system(url)
        if not is_local(url):
            return bool(fs.exists(path))
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def is_folder(url: str) -> bool:
    """Whether `url` is a folder, and not a file. Raises StorageError if that cannot be determined."""
    with _renamed("look at", url):
        fs, path = _open_file_system(url)
        return bool(fs.isdir(path))


def size(url: str) -> int:
    """A file's size in bytes."""
    return describe(url).size


class Found(NamedTuple):
    """A file: its size in bytes, and when it was written, in seconds since 1970 (None if unknown)."""

    size: int
    written: float | None


def find_files(url: str, *, deep: bool = True) -> dict[str, Found]:
    """All files of a folder, by their path relative to it (with `/`). Does not follow links to folders.

    deep: include its subfolders, at any depth.
    """
    with _renamed("list", url):
        fs, path = _open_file_system(url)
        if is_local(url):
            return {name: Found(status.st_size, status.st_mtime) for name, status in files.walk_files(path, deep)}
        entries = _list_entries(fs, path, deep)
        return {name[len(path.rstrip("/")) + 1 :]: _view_entry(entry) for name, entry in entries}


def describe(url: str) -> Found:
    """One file. Raises StorageError."""
    with _renamed("look at", url):
        fs, path = _open_file_system(url)
        return _view_entry(fs.info(path))


def _view_entry(entry: dict[str, Any]) -> Found:
    """A file as fsspec lists it."""
    when = next((entry[key] for key in ("LastModified", "last_modified", "mtime", "created") if key in entry), None)
    written = when.timestamp() if isinstance(when, datetime) else when if isinstance(when, float) else None
    return Found(int(entry["size"] or 0), written)


def _list_entries(fs: Any, path: str, deep: bool) -> list[tuple[str, Any]]:
    if deep:
        return list(fs.find(path, detail=True).items())
    try:
        return [(entry["name"], entry) for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
    except FileNotFoundError:
        return []


def list_names(url: str) -> list[str]:
    """The names in a folder, sorted. Empty if the folder does not exist."""
    with _renamed("list", url):
        fs, path = _open_file_system(url)
        try:
            found = fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        below = (
            name for item in found if (name := str(item).rstrip("/")) != path.rstrip("/")
        )  # listing a file gives itself
        return sorted(name.rsplit("/", 1)[-1] for name in below)


def make_folder(url: str) -> None:
    """Creates a folder and its parents, durably. Does nothing for object stores, which have no folders."""
    with _renamed("create", url):
        fs, path = _open_file_system(url, write=True)
        if not is_local(url):
            if url.startswith("memory:"):
                fs.makedirs(path, exist_ok=True)
            return
        missing = []
        while not os.path.exists(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            try:
                os.mkdir(folder, files.FOLDER_MODE)
            except FileExistsError:  # another rank was faster
                pass
            files.sync_names(os.path.dirname(folder))  # a folder's name must be as durable as its content
        os.makedirs(missing[0] if missing else path, exist_ok=True)  # raises if a file has this name


def read_bytes(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """A file's bytes, or those from `start` to `end`. Raises StorageError for pipes and devices: they may never end."""
    if is_local(url):
        with open_read(url) as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))
    with _renamed("read", url):
        fs, path = _open_file_system(url)
        return bytes(fs.cat_file(path, start=start, end=end))


@contextmanager
def open_read(url: str) -> Iterator[BinaryIO]:
    """Opens a file for reading. Raises StorageError, also for pipes and devices, and while the file is read."""
    with _renamed("read", url):
        fs, path = _open_file_system(url)
        require = lambda place: _require_open(url, place)  # noqa: E731
        with files.open_judged(path, url, require) if is_local(url) else fs.open(path, "rb") as file:
            yield file


def read_text(url: str, limit: int | None = None) -> str:
    """A file's text, decoded as UTF-8; at most its first `limit` bytes. With `limit`, a web server must also answer
    within a few seconds."""
    data = _read_page(url, limit) if limit and url.startswith(("http://", "https://")) else None
    data = read_bytes(url, 0 if limit else None, limit) if data is None else data
    try:
        return data.decode("utf-8", errors="ignore" if limit == len(data) else "strict")
    except UnicodeDecodeError as error:
        raise StorageError(f"cannot read {url}: not UTF-8 text (byte {error.start})") from error


def _read_page(url: str, limit: int) -> bytes:
    """The first `limit` bytes from a web server. The server may send slowly, or endlessly."""
    data = bytearray()
    with _renamed("read", url):
        fs, path = _open_file_system(url)
        from aiohttp import ClientTimeout

        try:
            # Without a size, fsspec would ask the server for one. A stream ignores its value.
            with fs.open(path, "rb", block_size=0, size=1, timeout=ClientTimeout(total=_PATIENCE)) as file:
                while len(data) < limit and (block := file.read(min(_BLOCK, limit - len(data)))):
                    data += block
        except TimeoutError as error:
            raise StorageError(f"cannot read {shorten(url)}: no complete answer within {_PATIENCE} s") from error
    return bytes(data)


@contextmanager
def open_write(url: str) -> Iterator[BinaryIO]:
    """Opens a file for writing. It is durable when the block ends. If the block raises, the file is deleted."""
    with _renamed("write", url):
        fs, path = _open_file_system(url, write=True)
        file: Any = files.open_new(path) if is_local(url) else fs.open(path, "wb")
    try:
        yield cast(BinaryIO, _Renamed(file, url))
        with _renamed("write", url):
            if is_local(url):
                file.flush()
                os.fsync(file.fileno())
            file.close()
    except BaseException:
        with _renamed("write", url):
            try:
                # Closing an upload would commit it, so discard it. A local file can only be closed, then deleted.
                file.close() if is_local(url) or not hasattr(file, "discard") else _discard(file)
            finally:
                if fs.exists(path):
                    fs.rm_file(path)
        raise


def _discard(file: Any) -> None:
    file.discard()
    if isinstance(file, fsspec.spec.AbstractBufferedFile):
        file.closed = True  # otherwise its destructor would commit the upload


class _Renamed:
    """A file for writing whose errors are translated to StorageError."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url
        self._written = self._begun = 0  # bytes

    def write(self, data: bytes | memoryview) -> int:
        with _renamed("write", self._url):
            count = int(self._file.write(data))
            self._written += count
            if self._written - self._begun >= _BEHIND and is_local(self._url):
                files.start_writeback(self._file.fileno(), self._begun, self._written)
                self._begun = self._written
            return count


def write_bytes(url: str, data: bytes) -> None:
    """Replaces a file atomically and durably: readers see either the old bytes or the new ones."""
    with _renamed("write", url):
        fs, path = _open_file_system(url, write=True)
        if not is_local(url):
            fs.pipe_file(path, data)
            return
        files.replace_file(path, data)


def create_bytes(url: str, data: bytes, *, exclusive: bool = True) -> None:
    """Creates a file durably. Raises FileExistsError if another writer created it first, with other bytes.

    `data` must be unique to this writer: if the store's answer is lost, reading the file back shows who created it.
    exclusive: False is for stores that cannot refuse a second creation (see checkpoint.root.attempts); two concurrent
    creations then both succeed.
    """
    with _renamed("create", url, passing=(FileExistsError,)):
        if not exclusive:
            if exists(url) and read_bytes(url) != data:
                raise FileExistsError(url)
            write_bytes(url, data)
            return
        fs, path = _open_file_system(url, write=True)
        if not is_local(url):
            _create_object(fs, path, data)
            return
        files.create_file(path, data)


def _create_object(fs: Any, path: str, data: bytes) -> None:
    for attempt in range(_CONFLICTS):
        try:
            fs.pipe_file(path, data, mode="create")
            return
        except (NotImplementedError, TypeError, ValueError):  # this file system has no such mode
            raise
        except Exception as error:
            # Either the file existed, or our creation succeeded but its answer was lost, and the library's retry was
            # refused. Reading the file back shows which.
            try:
                found = fs.cat_file(path)
            except FileNotFoundError:
                found = None
            if found == data:
                return
            if found is not None:
                raise FileExistsError(path) from error
            if "conflict" not in str(error).lower() or attempt == _CONFLICTS - 1:
                raise
            time.sleep(0.1 * 2**attempt)


def sync_folder(url: str) -> None:
    """Makes the names in a folder durable. Does nothing for object stores, which do not need it."""
    if is_local(url):
        with _renamed("write", url):
            files.sync_names(local_path(url))


def delete(url: str, *, recursive: bool = True) -> None:
    """Deletes a file, or with `recursive` also a folder and its content. Does nothing if it does not exist."""
    with _renamed("delete", url):
        fs, path = _open_file_system(url, write=True)
        try:
            fs.rm(path, recursive=recursive)
        except FileNotFoundError:
            return
        if is_local(url):
            files.sync_names(os.path.dirname(path))


def abort_uploads(url: str, *, hours: float, of: Callable[[str], bool] = bool) -> int:
    """Aborts uploads below a folder that began more than `hours` ago and never finished. Returns their number. `of`:
    whether to consider an upload, by its path relative to the folder.

    Killed writers leave such uploads on S3, where they are invisible but cost money. Other stores delete them on their
    own.
    """
    fs, path = _open_file_system(url, write=True)
    if not hasattr(fs, "list_multipart_uploads"):
        return 0
    with _renamed("clear uploads below", url):
        bucket, prefix, _ = fs.split_path(path)
        prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        found, page = [], {"IsTruncated": True}
        more: dict[str, Any] = {}
        while page.get("IsTruncated"):
            page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            found += page.get("Uploads", [])
            more = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
        oldest = datetime.now(UTC) - timedelta(hours=hours)
        meant = (upload for upload in found if of(upload["Key"][len(prefix) :]))
        old = [upload for upload in meant if upload["Initiated"] < oldest]
        for upload in old:
            try:
                fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
            except FileNotFoundError:  # it ended in the meantime
                continue
        return len(old)
