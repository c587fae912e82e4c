"""Reading and writing by URL: what is durable, what is exclusive, and what errors say."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import fsspec
import pytest

from dsjob import storage
from dsjob.errors import StorageError


@pytest.fixture(params=["path", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty folder's URL."""
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}"
        yield url
        storage.delete(url)
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}"


@pytest.fixture
def local(tmp_path: Path) -> str:
    """An empty folder's path."""
    return str(tmp_path)


# ---- on every file system


def test_what_is_written_is_read_back(root: str) -> None:
    url = storage.join(root, "a file.bin")
    storage.write_bytes(url, b"0123456789")
    assert storage.read_bytes(url) == b"0123456789"
    assert storage.read_bytes(url, 2, 5) == b"234"
    assert storage.size(url) == 10
    assert storage.exists(url)
    storage.write_bytes(url, b"\xc3\xa9")
    assert storage.read_text(url) == "é"


def test_names_are_listed_sorted_and_without_what_is_below_them(root: str) -> None:
    storage.make_folder(storage.join(root, "b", "deep"))
    for name in ("c", "a", "b/deep/x"):
        storage.write_bytes(storage.join(root, name), b"1")
    assert storage.list_names(root) == ["a", "b", "c"]
    assert storage.list_names(root + "/") == ["a", "b", "c"]


def test_a_name_that_is_also_that_of_its_folder_is_listed(root: str) -> None:
    folder = storage.join(root, "same")
    storage.make_folder(folder)
    storage.write_bytes(storage.join(folder, "same"), b"1")
    assert storage.list_names(folder) == ["same"]


def test_there_are_no_names_in_a_file_or_in_nothing(root: str) -> None:
    storage.write_bytes(storage.join(root, "file"), b"1")
    assert storage.list_names(storage.join(root, "file")) == []
    assert storage.list_names(storage.join(root, "nothing")) == []


def test_make_folder_makes_parents_and_may_be_repeated(root: str) -> None:
    for _ in range(2):
        storage.make_folder(storage.join(root, "a", "b"))
    storage.write_bytes(storage.join(root, "a", "b", "c"), b"1")
    assert storage.list_names(storage.join(root, "a")) == ["b"]


def test_create_makes_a_file_once(root: str) -> None:
    url = storage.join(root, "x")
    storage.create_bytes(url, b"first")
    with pytest.raises(FileExistsError):
        storage.create_bytes(url, b"second")
    assert storage.read_bytes(url) == b"first"
    assert storage.list_names(root) == ["x"]


def test_open_write_leaves_a_whole_file(root: str) -> None:
    url = storage.join(root, "x")
    with storage.open_write(url) as file:
        file.write(b"one")
        file.write(b"two")
    assert storage.read_bytes(url) == b"onetwo"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_open_write_leaves_nothing_when_the_block_raises_and_lets_the_error_pass(
    root: str, kind: type[BaseException]
) -> None:
    url = storage.join(root, "x")
    error = kind("mine")

    def write() -> None:
        with storage.open_write(url) as file:
            file.write(b"half")
            raise error

    with pytest.raises(kind) as caught:
        write()
    assert caught.value is error
    assert not storage.exists(url)
    assert storage.list_names(root) == []


def test_delete_takes_files_folders_and_nothing(root: str) -> None:
    storage.make_folder(storage.join(root, "folder"))
    storage.write_bytes(storage.join(root, "folder", "x"), b"1")
    storage.write_bytes(storage.join(root, "y"), b"1")
    for name in ("folder", "y", "nothing"):
        storage.delete(storage.join(root, name))
    assert storage.list_names(root) == []


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("read", lambda url: storage.read_bytes(url)),
        ("read", lambda url: storage.read_text(url)),
        ("look at", lambda url: storage.size(url)),
    ],
)
def test_a_missing_file_is_named(root: str, action: str, call: Any) -> None:
    url = storage.join(root, "gone")
    with pytest.raises(StorageError) as caught:
        call(url)
    assert str(caught.value) == f"cannot {action} {url}: no such file or folder"
    assert caught.value.exit_code == 1


def test_text_that_is_not_utf8_is_named_with_the_byte(root: str) -> None:
    url = storage.join(root, "x")
    storage.write_bytes(url, b"abc\xff")
    with pytest.raises(StorageError, match=r"not UTF-8 text \(byte 3\)"):
        storage.read_text(url)


# ---- URLs


@pytest.mark.parametrize(
    ("url", "names", "joined"),
    [
        ("a/b", ("c", "d"), "a/b/c/d"),
        ("a/b/", ("c",), "a/b/c"),
        ("/", ("c",), "/c"),
        ("memory://", ("c",), "memory://c"),
        ("memory://a/", ("c",), "memory://a/c"),
        ("s3://bucket", ("c",), "s3://bucket/c"),
    ],
)
def test_join_keeps_a_url_a_url(url: str, names: tuple[str, ...], joined: str) -> None:
    assert storage.join(url, *names) == joined


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("a/b", "a/b"),
        ("/a b", "/a b"),
        ("file:///a", "/a"),
        ("local:///a", "/a"),
        ("s3://a", None),
        ("memory://a", None),
    ],
)
def test_local_urls_are_told_from_others(url: str, path: str | None) -> None:
    assert storage.is_local(url) == (path is not None)
    if path is not None:
        assert storage.local_path(url) == path


@pytest.mark.parametrize("url", ["a\0b", "file:///a\0b", "\ud800"])
def test_what_can_name_no_file_is_a_storage_error(url: str) -> None:
    with pytest.raises(StorageError, match="cannot open"):
        storage.read_bytes(url)


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "nosuch://"])
def test_an_unknown_protocol_is_named(url: str) -> None:
    for call in (storage.read_bytes, storage.exists, storage.list_names, storage.make_folder):
        with pytest.raises(StorageError, match=r"cannot open nosuch://.*nosuch"):
            call(url)


# ---- durability on a disk of one's own


def refuse(*arguments: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_bytes_replaces_a_file_at_once_when_the_new_one_is_on_disk(
    local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = f"{local}/x", []
    storage.write_bytes(path, b"old")
    fsync, replace = os.fsync, os.replace

    def watch_fsync(handle: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def watch_replace(source: str, target: str) -> None:
        assert Path(source).read_bytes() == b"new"
        assert Path(target).read_bytes() == b"old"
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    storage.write_bytes(path, b"new")
    assert steps == ["file", "replace", "folder"]
    assert Path(path).read_bytes() == b"new"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_replacement_that_fails_leaves_the_old_file_and_no_other(
    local: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    storage.write_bytes(f"{local}/x", b"old")
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(StorageError, match=f"cannot write {local}/x: No space left on device"):
        storage.write_bytes(f"{local}/x", b"new")
    assert os.listdir(local) == ["x"]
    assert Path(local, "x").read_bytes() == b"old"


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_creation_that_fails_leaves_nothing(local: str, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(StorageError, match=f"cannot create {local}/x: No space left on device"):
        storage.create_bytes(f"{local}/x", b"new")
    assert os.listdir(local) == []


def test_a_creation_whose_answer_was_lost_is_ones_own(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.link

    def link(source: str, target: str) -> None:
        original(source, target)
        raise FileExistsError(target)  # as NFS says where the first answer was lost

    monkeypatch.setattr(os, "link", link)
    storage.create_bytes(f"{local}/x", b"mine")
    assert storage.read_bytes(f"{local}/x") == b"mine"
    with pytest.raises(FileExistsError):
        storage.create_bytes(f"{local}/x", b"other")
    assert storage.list_names(local) == ["x"]


def test_of_many_creators_one_wins(local: str) -> None:
    url, wins, losses, together = f"{local}/x", [], [], threading.Barrier(8)

    def create(number: int) -> None:
        together.wait()
        try:
            storage.create_bytes(url, str(number).encode() * 10_000)
            wins.append(number)
        except FileExistsError:
            losses.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert len(losses) == 7
    assert storage.read_bytes(url) == str(wins[0]).encode() * 10_000
    assert os.listdir(local) == ["x"]


def test_a_full_disk_is_named_with_what_to_do_and_leaves_no_half_file(
    local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse)
    with (
        pytest.raises(StorageError, match=f"cannot write {local}/x: No space left") as caught,
        storage.open_write(f"{local}/x") as file,
    ):
        file.write(b"1" * 100)
    assert "another disk" in caught.value.hint
    assert os.listdir(local) == []


def test_open_write_is_on_disk_when_it_ends(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, sizes = os.fsync, []

    def watch(handle: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    with storage.open_write(f"{local}/x") as file:
        file.write(b"1" * 100)
    assert sizes == [100]


def test_an_upload_that_fails_is_discarded_and_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Mock(spec=["write", "discard", "close"])
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "open", lambda self, path, mode: upload)
    with pytest.raises(KeyError), storage.open_write("memory://no/such/upload"):
        raise KeyError
    assert [call[0] for call in upload.method_calls] == ["discard"]
    with storage.open_write("memory://no/such/upload"):
        pass
    assert [call[0] for call in upload.method_calls] == ["discard", "close"]


# ---- what cannot be written


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("write", lambda url: storage.write_bytes(url, b"1")),
        ("create", lambda url: storage.create_bytes(url, b"1")),
        ("create", lambda url: storage.make_folder(url)),
        ("read", lambda url: storage.read_bytes(url)),
    ],
)
def test_a_file_in_place_of_a_folder_is_a_storage_error(local: str, action: str, call: Any) -> None:
    Path(local, "file").write_text("1")
    with pytest.raises(
        StorageError, match=f"cannot {action} {local}/file/x: part of this path is a file, not a folder"
    ):
        call(f"{local}/file/x")
    assert os.listdir(local) == ["file"]


def test_a_file_in_place_of_the_folder_itself_is_a_storage_error(local: str) -> None:
    Path(local, "file").write_text("1")
    with pytest.raises(StorageError, match=f"cannot create {local}/file: File exists"):
        storage.make_folder(f"{local}/file")


def test_a_folder_in_place_of_a_file_is_a_storage_error(local: str) -> None:
    os.mkdir(f"{local}/folder")
    for call in (storage.read_bytes, lambda url: storage.write_bytes(url, b"1")):
        with pytest.raises(StorageError, match=rf"cannot (read|write) {local}/folder: Is a directory"):
            call(f"{local}/folder")
    assert os.listdir(local) == ["folder"]


def test_what_cannot_be_told_is_not_said_to_be_missing(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is taken for missing costs the folder that it names."""
    Path(local, "x").write_text("1")
    Path(local, "folder").mkdir()

    def fail(path: str, **_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", fail)
        with pytest.raises(StorageError, match=f"cannot look at {local}/x: Input/output error"):
            storage.exists(f"{local}/x")
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        with pytest.raises(StorageError, match=f"cannot list {local}: Input/output error"):
            storage.find_files(local)
    assert storage.exists(f"{local}/x")
    assert not storage.exists(f"{local}/y")
    assert not storage.exists(f"{local}/x/y")


def test_a_folder_that_is_missing_is_named(local: str) -> None:
    for call in (storage.write_bytes, storage.create_bytes):
        with pytest.raises(StorageError, match=f"{local}/gone/x: no such file or folder"):
            call(f"{local}/gone/x", b"1")


@pytest.fixture
def nobody(local: str) -> Iterator[None]:
    """A user who may do nothing in `local`, which only root may become."""
    os.chmod(local, 0o500 if os.geteuid() else 0o700)
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield
    os.chmod(local, 0o700)


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("write", lambda url: storage.write_bytes(url, b"1")),
        ("create", lambda url: storage.create_bytes(url, b"1")),
        ("create", lambda url: storage.make_folder(url)),
        ("write", lambda url: storage.open_write(url).__enter__()),
    ],
)
def test_a_place_where_one_may_not_write_is_named_with_what_to_do(local: str, action: str, call: Any) -> None:
    with pytest.raises(StorageError, match=f"cannot {action} {local}/x: permission denied") as caught:
        call(f"{local}/x")
    assert caught.value.hint == "choose a folder that you can write to"


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_all_files_below_a_folder(tmp_path: Path, kind: str) -> None:
    url = f"memory://{tmp_path}/x" if kind == "memory" else str(tmp_path / "x")
    storage.make_folder(storage.join(url, "below"))
    storage.write_bytes(storage.join(url, "a"), b"12")
    storage.write_bytes(storage.join(url, "below", "b"), b"345")
    found = storage.find_files(url)
    assert {name: file.size for name, file in found.items()} == {"a": 2, "below/b": 3}
    assert all(file.written is not None and abs(file.written - time.time()) < 600 for file in found.values())
    assert storage.find_files(storage.join(url, "nothing")) == {}
    here = storage.find_files(url, deep=False)
    assert here == {"a": found["a"]}
    assert storage.find_files(storage.join(url, "nothing"), deep=False) == {}
