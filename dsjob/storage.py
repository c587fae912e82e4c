"""Reading and writing by URL: the home of fsspec. Everything that dsjob keeps goes through here.

A URL is a plain string: a local path, or `scheme://...` with a protocol that `locations` allows; never a `Path`, which
folds `s3://` into `s3:/`. Errors of file systems become `StorageError`. Each store's own library finds credentials.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec

from dsjob.contract.locations import explain_url, shorten
from dsjob.contract.secrets import describe_secret, redact
from dsjob.errors import DsjobError, StorageError
from dsjob.files import FOLDER_MODE, is_plain, open_new, sync_names, walk_files, write_temporary

_BEHIND = 32 << 20  # bytes that wait for the disk before it is told to begin
_PATIENCE, _BLOCK = 15, 1 << 16  # for a document from the web: seconds in all, bytes at a time
_CONFLICTS = 5  # how often a creation is tried again where another one of the same file is under way


@contextmanager
def _renamed(action: str, url: str, passing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Renames what a file system raises into StorageError, but for what is `passing`."""
    try:
        yield
    except DsjobError:
        raise
    except passing:
        raise
    except PermissionError as error:
        detail = "permission denied" if is_local(url) else f"permission denied: {error}"
        raise _name(action, url, detail, "choose a folder you may write") from error
    except FileNotFoundError as error:
        bucket = "bucket" in str(error).lower()
        detail = "there is no such bucket" if bucket else "no such file or folder"
        raise _name(action, url, detail, "dsjob makes none: correct its name, or make it" if bucket else "") from error
    except OSError as error:
        full = "free some space, or point checkpoint.dir at another disk" if error.errno in (27, 28, 122) else ""
        raise _name(action, url, error.strerror or str(error), full) from error
    except Exception as error:  # what the libraries of stores raise: no credentials, no connection, no answer
        if is_local(url):
            raise
        raise _name(action, url, f"{type(error).__name__}: {error}") from error


def _name(action: str, url: str, detail: str, hint: str = "") -> StorageError:
    return StorageError(redact(f"cannot {action} {url}: {detail}"), hint=hint)


def _open_file_system(url: str, *, write: bool = False) -> tuple[Any, str]:
    if secret := describe_secret(url):
        hint = "leave it out: credentials come from the environment or the profile of the store's own tools"
        raise StorageError(f"cannot open {redact(url)}: {secret}", hint=hint)
    _, refusal, hint = explain_url(url, write=write)
    if refusal:
        raise StorageError(f"cannot open {shorten(url)}: {refusal}", hint=hint)
    # Listings of object stores go stale within the process that made them: never cached.
    options = {} if is_local(url) or url.startswith("memory:") else {"use_listings_cache": False}
    try:
        if b"\0" in os.fsencode(url):
            raise ValueError("a path holds no NUL")
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url, **options))
    except (ImportError, ValueError) as error:  # unknown protocol, its package not installed, not to be encoded
        raise StorageError(redact(f"cannot open {url}: {error}")) from error


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
    """Whether a file or folder is there; StorageError where that cannot be told."""
    with _renamed("look at", url):
        fs, path = _open_file_system(url)
        if not is_local(url):
            return bool(fs.exists(path))
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def size(url: str) -> int:
    """A file's size in bytes."""
    with _renamed("look at", url):
        fs, path = _open_file_system(url)
        return int(fs.info(path)["size"])


class Found(NamedTuple):
    """A file: its size in bytes, and when it was written, in seconds since 1970 (None where nobody says)."""

    size: int
    written: float | None


def find_files(url: str, *, deep: bool = True) -> dict[str, Found]:
    """Every file below a folder, by its path there with `/` between names; links to folders are not entered.

    `deep`: in folders of it too, at whatever depth.
    """
    with _renamed("list", url):
        fs, path = _open_file_system(url)
        if is_local(url):
            return {name: Found(status.st_size, status.st_mtime) for name, status in walk_files(path, deep)}
        found, keys = {}, ("LastModified", "last_modified", "mtime", "created")
        for name, entry in _list_entries(fs, path, deep):
            when = next((entry[key] for key in keys if key in entry), None)
            written = when.timestamp() if isinstance(when, datetime) else when if isinstance(when, float) else None
            found[name[len(path.rstrip("/")) + 1 :]] = Found(int(entry["size"] or 0), written)
        return found


def _list_entries(fs: Any, path: str, deep: bool) -> list[tuple[str, Any]]:
    if deep:
        return list(fs.find(path, detail=True).items())
    try:
        return [(entry["name"], entry) for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
    except FileNotFoundError:
        return []


def list_names(url: str) -> list[str]:
    """The names directly below a folder, sorted; empty where there is no such folder."""
    with _renamed("list", url):
        fs, path = _open_file_system(url)
        try:
            found = fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        below = (name for item in found if (name := str(item).rstrip("/")) != path.rstrip("/"))  # a file lists itself
        return sorted(name.rsplit("/", 1)[-1] for name in below)


def make_folder(url: str) -> None:
    """Makes a folder and its parents; object stores need none."""
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
                os.mkdir(folder, FOLDER_MODE)
            except FileExistsError:  # another rank was faster
                pass
            sync_names(os.path.dirname(folder))  # names of folders have to be as durable as what goes into them
        os.makedirs(missing[0] if missing else path, exist_ok=True)  # raises where a file has the name


def read_bytes(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """A file's bytes, or those from `start` up to `end`; StorageError for a pipe or a device, which may have no end."""
    with _renamed("read", url):
        fs, path = _open_file_system(url)
        if is_local(url) and not is_plain(path):
            raise StorageError(f"cannot read {url}: not a plain file", hint="give the path of a file")
        return bytes(fs.cat_file(path, start=start, end=end))


def read_text(url: str, limit: int | None = None) -> str:
    """A file's text, UTF-8; of a longer one its first `limit` bytes, which a web server has to give soon."""
    data = _read_page(url, limit) if limit and url.startswith(("http://", "https://")) else None
    data = read_bytes(url, 0 if limit else None, limit) if data is None else data
    try:
        return data.decode("utf-8", errors="ignore" if limit == len(data) else "strict")
    except UnicodeDecodeError as error:
        raise StorageError(f"cannot read {url}: not UTF-8 text (byte {error.start})") from error


def _read_page(url: str, limit: int) -> bytes:
    """The first `limit` bytes that a web server sends, which may send them slowly, or without an end."""
    data = bytearray()
    with _renamed("read", url):
        fs, path = _open_file_system(url)
        from aiohttp import ClientTimeout

        try:
            # A size, or the server is asked for it; which one does not matter to a stream.
            with fs.open(path, "rb", block_size=0, size=1, timeout=ClientTimeout(total=_PATIENCE)) as file:
                while len(data) < limit and (block := file.read(min(_BLOCK, limit - len(data)))):
                    data += block
        except TimeoutError as error:
            raise StorageError(f"cannot read {shorten(url)}: it takes more than {_PATIENCE} s") from error
    return bytes(data)


@contextmanager
def open_write(url: str) -> Iterator[BinaryIO]:
    """A file to write; durable once the block ends, and absent (never cut short) when the block raises."""
    with _renamed("write", url):
        fs, path = _open_file_system(url, write=True)
        file: Any = open_new(path) if is_local(url) else fs.open(path, "wb")
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
                # To close an upload is to commit what is there of it; a local file knows nothing else.
                file.close() if is_local(url) or not hasattr(file, "discard") else _discard(file)
            finally:
                if fs.exists(path):
                    fs.rm_file(path)
        raise


def _discard(file: Any) -> None:
    file.discard()
    if isinstance(file, fsspec.spec.AbstractBufferedFile):
        file.closed = True  # or its destructor commits what is there


class _Renamed:
    """A file that is written, with the errors of this module."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url
        self._written = self._begun = 0  # bytes

    def write(self, data: bytes | memoryview) -> int:
        with _renamed("write", self._url):
            count = int(self._file.write(data))
            self._written += count
            if self._written - self._begun >= _BEHIND and is_local(self._url):
                _start_writeback(self._file.fileno(), self._begun, self._written)
                self._begun = self._written
            return count


def _start_writeback(handle: int, start: int, end: int) -> None:
    """Lets the disk begin with bytes that were just written, so that it works meanwhile and not in fsync alone."""
    if sys.platform == "linux":  # elsewhere the same hint starts nothing
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)


def write_bytes(url: str, data: bytes) -> None:
    """Replaces a file as a whole, durably: readers see the old bytes or the new ones."""
    with _renamed("write", url):
        fs, path = _open_file_system(url, write=True)
        if not is_local(url):
            fs.pipe_file(path, data)
            return
        temporary = write_temporary(path, data)
        try:
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_names(os.path.dirname(path))


def create_bytes(url: str, data: bytes, *, exclusive: bool = True) -> None:
    """Creates a file durably; FileExistsError when somebody else has created it first, with other bytes.

    Give bytes that no other writer has: where an answer was lost on its way, what is there tells whose creation it was.
    Not `exclusive`: for stores that cannot refuse a second creation (see checkpoint.attempts); two at once both pass.
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
        temporary = write_temporary(path, data)
        try:
            os.link(temporary, path)  # exclusive and atomic: the file appears whole, or FileExistsError
        except FileExistsError:
            if read_bytes(url) != data:  # the same: on NFS, one's own whose answer was lost
                raise
        finally:
            os.unlink(temporary)
        sync_names(os.path.dirname(path))


def _create_object(fs: Any, path: str, data: bytes) -> None:
    for attempt in range(_CONFLICTS):
        try:
            fs.pipe_file(path, data, mode="create")
            return
        except (NotImplementedError, TypeError, ValueError):  # it knows no such mode
            raise
        except Exception as error:
            # Refused, or done with the acknowledgement lost and a second try refused: reading back tells.
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
    """Makes the names in a folder durable; object stores need no such thing."""
    if is_local(url):
        with _renamed("write", url):
            sync_names(local_path(url))


def delete(url: str, *, recursive: bool = True) -> None:
    """Deletes a file, or where `recursive` a folder with all in it; nothing happens where there is nothing."""
    with _renamed("delete", url):
        fs, path = _open_file_system(url, write=True)
        try:
            fs.rm(path, recursive=recursive)
        except FileNotFoundError:
            return
        if is_local(url):
            sync_names(os.path.dirname(path))


def abort_uploads(url: str, *, hours: float, of: Callable[[str], bool] = bool) -> int:
    """Ends uploads below a folder that were begun more than `hours` ago and never finished; how many there were. `of`:
    whether one with that path there is meant.

    A writer that is killed leaves them on S3, unseen and paid for. Other stores clear them away by themselves.
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
            except FileNotFoundError:  # it has ended meanwhile
                continue
        return len(old)
