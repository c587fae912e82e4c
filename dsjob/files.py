"""Files on this machine: how they are made durable, and what is refused of files that somebody else may have placed.

A folder of checkpoints, runs or models may come from anybody. A pipe in it would let a reader wait for ever, and a link
would have a writer change a file elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from dsjob.errors import StorageError

FILE_MODE, FOLDER_MODE = 0o640, 0o750


def is_plain(path: str) -> bool:
    """Whether nobody waits who opens `path`, wherever links lead: it is no pipe and no device, or is not there."""
    try:
        mode = os.stat(path).st_mode
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    except (OSError, ValueError):
        return True


def require_own(path: str) -> None:
    """Raises StorageError where a run may not write to `path`: it is a link, or something else than a file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise _explain_foreign(path)


def open_append(path: str) -> BinaryIO:
    """A file to append to, made where it is not there. Raises StorageError as `require_own`."""
    flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK
    require_own(path)
    try:
        return open(os.open(path, flags | os.O_NOFOLLOW, 0o666), "ab")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # put there since
            raise _explain_foreign(path) from error
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _explain_foreign(path: str) -> StorageError:
    what = "a link" if os.path.islink(path) else "not a plain file"
    return StorageError(f"{path} is {what}, and a run writes there", hint="delete it, or choose another folder")


def walk_files(path: str, deep: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a folder (where not `deep`: directly in it), by its path there."""

    def fail(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, PermissionError)):  # gone meanwhile, or nothing of ours
            raise error

    for folder, _, names in os.walk(path, onerror=fail):
        for name in names:
            full = os.path.join(folder, name)
            try:
                status = os.stat(full)
            except OSError:  # gone meanwhile, or a link to nothing
                continue
            yield os.path.relpath(full, path).replace(os.sep, "/"), status
        if not deep:
            return


def open_new(path: str) -> BinaryIO:
    """A file to write, empty."""
    return open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, FILE_MODE), "wb")


def write_temporary(path: str, data: bytes) -> str:
    """A new file beside `path` with `data`, durable but for its name, which is returned."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def sync_names(path: str) -> None:
    """fsync of a file does not cover its name."""
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
