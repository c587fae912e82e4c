"""Local files: durable writes, and protection against files that someone else has placed in a folder.

A folder of checkpoints, runs or models can come from anyone. A pipe in it would block a reader for ever, and a symbolic
link would redirect a write to a file elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from dsjob.errors import StorageError
from dsjob.terminal import quote_path

FILE_MODE, FOLDER_MODE = 0o640, 0o750
_TEMPORARY = "dsjob-"  # begins the names of temporary folders
_OWNER = ".owner"  # the file in them that their process has locked; it holds the name of the machine
_BLOCK = 64 << 10  # bytes that `read_lines_backwards` reads at a time


def is_plain(path: str) -> bool:
    """Whether opening `path`, following links, cannot block: it is a file or folder, or does not exist."""
    try:
        mode = os.stat(path).st_mode
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    except (OSError, ValueError):
        return True


def require_own(path: str) -> None:
    """Raises StorageError if a run may not write to `path`, because it is a link or not a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise _explain_foreign(path)


def open_append(path: str) -> BinaryIO:
    """Opens a file to append to, and creates it if necessary. Raises StorageError like `require_own`."""
    flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK
    require_own(path)
    try:
        return open(os.open(path, flags | os.O_NOFOLLOW, 0o666), "ab")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or pipe was placed there after the check
            raise _explain_foreign(path) from error
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def append_bytes(path: str, data: bytes) -> None:
    """Adds `data` to the end of a file, created if necessary. Raises StorageError."""
    with explained(path), open_append(path) as file:
        file.write(data)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Turns errors of writing to a file, such as a full disk, into StorageError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space, or choose another folder" if full else ""
        raise StorageError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def open_update(path: str) -> BinaryIO:
    """Opens an existing file to read and change, unbuffered. Raises StorageError like `require_own`."""
    require_own(path)
    try:
        return open(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW), "r+b", buffering=0)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or pipe was placed there after the check
            raise _explain_foreign(path) from error
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def open_judged(path: str, name: str, require: Callable[[str], None]) -> BinaryIO:
    """Opens a regular file to read. `require` gets the real path of what was opened, and raises an error if that may
    not be read: links may have changed in the meantime. Raises StorageError for pipes and devices, which `name` names,
    and the errors of `open`."""
    if not is_plain(path):
        raise StorageError(f"cannot read {name}: not a regular file", hint="give the path of a file")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require(_find_real_path(handle, path))
        return open(handle, "rb")  # raises IsADirectoryError
    except BaseException:
        os.close(handle)
        raise


def _find_real_path(handle: int, path: str) -> str:
    opened = f"/proc/self/fd/{handle}"
    if os.path.lexists(opened):  # on Linux
        return os.readlink(opened)
    real = os.path.realpath(path)
    if not os.path.samestat(os.stat(real), os.fstat(handle)):
        raise StorageError(f"cannot read {path}: it was replaced while it was opened")
    return real


def open_read(path: str) -> BinaryIO:
    """Opens a regular file to read, unbuffered. Raises StorageError for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise StorageError(f"cannot read {path}: it is not a regular file")
    return open(handle, "rb", buffering=0)


def read_lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of an unbuffered file from the last to the first, without empty ones, each with its offset.

    Reads blocks from the end, so that a reader that stops early has not read the rest of the file.
    """
    begin, size = file.seek(0, os.SEEK_END), _BLOCK
    head = b""  # what was read at `begin` and after: the end of a line that may begin further ahead
    while begin:
        end, begin = begin, max(0, begin - size)
        file.seek(begin)
        block = file.read(end - begin) + head
        head, *lines = block.split(b"\n")
        after = begin + len(block)
        for line in reversed(lines):
            if line:
                yield after - len(line), line
            after -= len(line) + 1
        size = _BLOCK if lines else 2 * size  # doubled, so that one long line is not copied again and again
    if head:
        yield 0, head


def _explain_foreign(path: str) -> StorageError:
    what = "a symbolic link" if os.path.islink(path) else "not a regular file"
    return StorageError(f"cannot write {path}: it is {what}", hint="delete it, or choose another folder")


def walk_files(path: str, deep: bool) -> Iterator[tuple[str, os.stat_result]]:
    """All files below a folder (if not `deep`: directly in it), by their paths relative to it."""

    def fail(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, PermissionError)):  # deleted meanwhile, or another user's folder
            raise error

    for folder, _, names in os.walk(path, onerror=fail):
        for name in names:
            full = os.path.join(folder, name)
            try:
                status = os.stat(full)
            except OSError:  # deleted meanwhile, or a broken link
                continue
            yield os.path.relpath(full, path).replace(os.sep, "/"), status
        if not deep:
            return


def open_new(path: str) -> BinaryIO:
    """Opens a file for writing, and empties it if it exists."""
    return open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, FILE_MODE), "wb")


def write_temporary(path: str, data: bytes) -> str:
    """Writes `data` to a new temporary file next to `path`, and returns its name.

    The contents are durable; the file's name is not, until `sync_names` is called for the folder.
    """
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


def replace_file(path: str, data: bytes) -> None:
    """Replaces a file atomically and durably: readers see either the old bytes or the new ones."""
    temporary = write_temporary(path, data)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_names(os.path.dirname(path))


def create_file(path: str, data: bytes) -> None:
    """Creates a file durably. Raises FileExistsError if there is one with other bytes."""
    temporary = write_temporary(path, data)
    try:
        os.link(temporary, path)  # exclusive and atomic: the file appears whole, or FileExistsError
    except FileExistsError:
        with open(path, "rb") as file:
            if file.read() != data:  # equal bytes: our own link succeeded, but NFS lost the answer
                raise
    finally:
        os.unlink(temporary)
    sync_names(os.path.dirname(path))


def start_writeback(handle: int, start: int, end: int) -> None:
    """Makes the kernel start writing these bytes to disk at once, so that the final fsync has little left to do."""
    if sys.platform == "linux":  # on other systems, the hint does not start writing
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)


def sync_names(path: str) -> None:
    """Makes the names of files in a folder durable: fsync of a file does not cover its name."""
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_cache(name: str, what: str, chosen: str | None, variable: str) -> str:
    """A folder for what this user's processes build and will load as code: `chosen`, by the environment variable
    `variable`, or `dsjob/NAME` in the user's cache folder. Creates it. what: its content, for messages.

    Raises StorageError for a folder that other users can write to: they could place a library there, which would be
    loaded.
    """
    try:
        folder = os.path.expanduser(chosen or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/dsjob/{name}")
        if folder.startswith("~"):  # a container's user without a name, and without HOME
            hint = f"name one with {variable}=/path"
            raise StorageError(f"this user has no home folder for {what}", hint=hint)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        folder = os.path.realpath(folder)
        found = os.stat(folder)
        above = next((parent for parent in _list_parents(folder) if _is_open(parent)), "")
    except OSError as error:
        hint = f"name another with {variable}"
        raise StorageError(f"cannot create the folder of {what} {folder}: {error.strerror}", hint=hint) from error
    if above:
        raise StorageError(
            f"other users can replace the folder of {what} {folder}, since they can write to {above}",
            hint=f"name a folder of your own with {variable}",
        )
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            f"other users can write to the folder of {what} {folder}",
            hint=f"chmod 700 {quote_path(folder)}, or name a folder of your own with {variable}",
        )
    return folder


def _list_parents(path: str) -> Iterator[str]:
    while (above := os.path.dirname(path)) != path:
        yield above
        path = above


def _is_open(folder: str) -> bool:
    """Whether everyone may rename what others have put into a folder. Sticky folders such as /tmp prevent that."""
    mode = os.stat(folder).st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def lock(path: str) -> BinaryIO | None:
    """The file, created if necessary and locked by this process alone; None if it cannot be locked, or another process
    has the lock. A lock ends with its process, however that ends."""
    with suppress(StorageError):
        file = open_append(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locked.add(file.fileno())
            return file
        except OSError:
            file.close()
    return None


def unlock(file: BinaryIO) -> None:
    """Closes a file that `lock` has returned."""
    _locked.discard(file.fileno())
    file.close()


_locked: set[int] = set()  # file descriptors


def _close_locked() -> None:
    for handle in _locked:
        os.close(handle)
    _locked.clear()


# A lock lasts as long as any process has the file open, and workers of data loaders outlive a killed run for seconds.
os.register_at_fork(after_in_child=_close_locked)


@contextmanager
def temporary_folder(purpose: str = "") -> Iterator[str]:
    """A private folder among the system's temporary files, which is deleted after the block unless it is kept
    (`keep_only`). First deletes those that this user's killed processes have left.

    purpose: a word for its name.
    """
    _delete_left()
    folder, process = tempfile.mkdtemp(prefix=f"{_TEMPORARY}{purpose}{'-' * bool(purpose)}"), os.getpid()
    # It has its name only once it is locked, so that no other process takes its owner for dead.
    path = os.path.join(folder, _OWNER)
    file = lock(f"{path}.new")
    if file is not None:
        file.write(socket.gethostname().encode())
        file.flush()
        os.rename(f"{path}.new", path)
    try:
        yield folder
    finally:
        if os.getpid() == process:  # else a fork leaves the block, and its parent goes on
            if file is None or os.path.exists(path):
                shutil.rmtree(folder, ignore_errors=True)
            if file is not None:
                unlock(file)


def keep_only(folder: str, name: str) -> None:
    """Keeps a temporary folder after its block, with nothing in it but the file or folder `name`."""
    for other in set(os.listdir(folder)) - {name}:
        path = os.path.join(folder, other)
        shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)


def _delete_left() -> None:
    """Deletes temporary folders of this user whose process, on this machine, has ended without deleting them."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_TEMPORARY) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError, StorageError):
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            return False
        with open_read(os.path.join(entry.path, _OWNER)) as file:
            # Another machine may share the folder without sharing its locks.
            if file.read(256) == socket.gethostname().encode():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    return False
