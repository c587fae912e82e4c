"""Reading and writing on a real S3 protocol server: what is exclusive, what a fault may do, what errors say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from s3 import CREDENTIALS, forget_connections
from s3_faults import KINDS, FaultyStore, faulty_store

from dsjob import storage
from dsjob.checkpoint.root.attempts import Attempt, creates_once
from dsjob.checkpoint.root.garbage import clear
from dsjob.errors import StorageError

WRITES = ("PUT", "POST")


def test_one_of_many_creators_wins(s3: str) -> None:
    url, outcomes, together = f"{s3}/x", [], threading.Barrier(8)

    def create(number: int) -> None:
        together.wait()
        try:
            storage.create_bytes(url, str(number).encode())
            outcomes.append(number)
        except FileExistsError:
            outcomes.append(None)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number in outcomes if number is not None]
    assert len(winners) == 1
    assert storage.read_bytes(url) == str(winners[0]).encode()


def test_what_others_write_is_seen_at_once(s3: str) -> None:
    assert storage.list_names(s3) == []
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(f"{s3}/x".removeprefix("s3://"), b"1")
    assert storage.list_names(s3) == ["x"]
    assert storage.exists(f"{s3}/x")
    other.pipe_file(f"{s3}/x".removeprefix("s3://"), b"123")
    assert storage.size(f"{s3}/x") == 3


def test_a_bucket_that_is_not_there_is_told_and_never_made(s3: str) -> None:
    url = "s3://mistyped-bucket/run/x"
    for call in (
        lambda: storage.write_bytes(url, b"1"),
        lambda: storage.create_bytes(url, b"1"),
        lambda: storage.read_bytes(url),
    ):
        with pytest.raises(StorageError, match=r"mistyped-bucket/run/x: the bucket does not exist") as caught:
            call()
        assert "dsjob does not create buckets" in caught.value.hint
    storage.make_folder("s3://mistyped-bucket/run")
    with pytest.raises(StorageError, match="mistyped-bucket"), storage.open_write(url) as file:
        file.write(b"1" * (60 << 20))
    assert "mistyped-bucket" not in fsspec.filesystem("s3").ls("")


def test_an_upload_that_fails_is_never_committed(s3: str) -> None:
    def upload() -> None:
        with storage.open_write(f"{s3}/x") as file:
            for _ in range(15):
                file.write(b"1" * (4 << 20))  # more than one part of 50 MiB
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        upload()
    assert storage.list_names(s3) == []
    assert list_uploads(s3) == []


def list_uploads(url: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(url)
    return [upload["Key"] for upload in fs.list_multipart_uploads(path.split("/")[0])]


KILLED = """
import os, sys
from dsjob import storage
with storage.open_write(sys.argv[1] + "/x") as file:
    for _ in range(15):
        file.write(b"1" * (4 << 20))
    print("half", flush=True)
    sys.stdin.read()
"""


def test_of_a_killed_upload_nothing_is_seen_and_what_is_left_is_swept(s3: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, s3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout
    assert writer.stdout.readline() == "half\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert storage.list_names(s3) == []
    assert list_uploads(s3) == ["root/x"]
    assert storage.abort_uploads(f"{s3}/elsewhere", hours=24) == 0
    assert storage.abort_uploads(s3, hours=1e6) == 0
    assert storage.abort_uploads(s3, hours=24) == 1  # the server says of every upload that it is years old
    assert list_uploads(s3) == []


def test_uploads_of_others_are_left_to_them_by_a_run(s3: str) -> None:
    fs, path = fsspec.core.url_to_fs(s3, use_listings_cache=False)
    bucket, _, root = path.partition("/")
    for name in ("step-00000001-a0001/r00000-of-00001.safetensors", "others/large", "large"):
        fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{root}/{name}")
    assert clear(s3, Attempt(s3, 2, True)) == ()
    assert sorted(list_uploads(s3)) == [f"{root}/large", f"{root}/others/large"]


def test_every_page_of_uploads_is_swept(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of tests gives one page, whatever is asked for: pages of one are cut here."""
    fs, path = fsspec.core.url_to_fs(s3, use_listings_cache=False)
    bucket = path.split("/")[0]
    for name in "abc":
        fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{path.partition('/')[2]}/{name}")
    original = type(fs).call_s3

    def page(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if method != "list_multipart_uploads":
            return original(self, method, *arguments, **options)
        marker = options.pop("KeyMarker", ""), options.pop("UploadIdMarker", "")
        found = sorted(original(self, method, **options)["Uploads"], key=lambda u: (u["Key"], u["UploadId"]))
        left = [upload for upload in found if (upload["Key"], upload["UploadId"]) > marker]
        last = {"NextKeyMarker": left[0]["Key"], "NextUploadIdMarker": left[0]["UploadId"]}
        return {"Uploads": left[:1], "IsTruncated": len(left) > 1, **last}

    monkeypatch.setattr(type(fs), "call_s3", page)
    assert storage.abort_uploads(s3, hours=24) == 3
    monkeypatch.undo()
    assert list_uploads(s3) == []


def test_stores_that_refuse_a_second_creation_are_told_from_others(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for root in (s3, str(tmp_path), "memory://probe"):
        storage.write_bytes(f"{root}/x", b"1")
        assert creates_once(f"{root}/x")
    kind = fsspec.get_filesystem_class("s3")
    original = kind._pipe_file

    async def overwrite(self: Any, path: str, data: bytes, mode: str = "", **options: Any) -> None:
        await original(self, path, data)

    monkeypatch.setattr(kind, "_pipe_file", overwrite)
    forget_connections()
    assert not creates_once(f"{s3}/x")
    storage.write_bytes(f"{s3}/y", b"mine")
    storage.create_bytes(f"{s3}/y", b"mine", exclusive=False)
    with pytest.raises(FileExistsError):
        storage.create_bytes(f"{s3}/y", b"other", exclusive=False)

    async def refuse(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(kind, "_pipe_file", refuse)
    forget_connections()
    assert not creates_once(f"{s3}/x")
    forget_connections()


@pytest.fixture
def faulty(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    with faulty_store(s3_server, monkeypatch) as store:
        yield store


def open_and_write(url: str) -> None:
    with storage.open_write(url) as file:
        file.write(b"payload")


CALLS: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "create": (WRITES, lambda url: storage.create_bytes(url, b"payload")),
    "write": (WRITES, lambda url: storage.write_bytes(url, b"payload")),
    "upload": (WRITES, open_and_write),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["409", "503", "drop", "hang", "lost"])
@pytest.mark.full("hang-write", "hang-create")
def test_a_fault_of_one_write_is_mended(s3: str, faulty: FaultyStore, kind: str, call: str) -> None:
    methods, act = CALLS[call]
    fault = faulty.fail(kind, *methods, part="/x")
    try:
        act(f"{s3}/x")
    except StorageError:
        assert kind == "409"  # no store says so of what is not conditional
        assert call != "create"
    else:
        assert storage.read_bytes(f"{s3}/x") == b"payload"
    assert fault.times == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:6])
@pytest.mark.full("hang")
def test_creation_is_never_taken_for_anothers_nor_the_other_way_round(s3: str, faulty: FaultyStore, kind: str) -> None:
    faulty.fail(kind, *WRITES, part="/x")
    try:
        storage.create_bytes(f"{s3}/x", b"mine")
        created = True
    except StorageError:
        created = False  # nothing was said of who was first
        assert kind == "412"
    assert storage.exists(f"{s3}/x") == created
    storage.write_bytes(f"{s3}/y", b"theirs")
    faulty.fail(kind, *WRITES, part="/y")
    with pytest.raises(FileExistsError):
        storage.create_bytes(f"{s3}/y", b"mine")
    assert storage.read_bytes(f"{s3}/y") == b"theirs"


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.full("create", "upload")
def test_a_store_that_stays_busy_is_an_error_in_words(
    s3: str, faulty: FaultyStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)  # it would be borne with for long
    methods, act = CALLS[call]
    faulty.fail("503", *methods, part="/x", times=1000)
    with pytest.raises(StorageError, match=r"cannot (create|write) s3://.*/x: "):
        act(f"{s3}/x")
    assert not storage.exists(f"{s3}/x")


@pytest.mark.parametrize("kind", ["503", "drop", "hang", "cut"])
def test_a_fault_of_one_read_is_mended(s3: str, faulty: FaultyStore, kind: str) -> None:
    storage.write_bytes(f"{s3}/x", bytes(range(200)))
    fault = faulty.fail(kind, "GET", part="/x")
    assert storage.read_bytes(f"{s3}/x") == bytes(range(200))
    assert fault.times == 0
    if kind != "hang":  # for which the client waits a second
        faulty.fail(kind, "GET", part="/x")
    assert storage.read_bytes(f"{s3}/x", 10, 20) == bytes(range(10, 20))


def test_no_credentials_are_an_error_in_words(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    forget_connections()
    with pytest.raises(StorageError, match=f"cannot write {s3}/x: .*[Cc]redentials"):
        storage.write_bytes(f"{s3}/x", b"1")
    monkeypatch.undo()
    forget_connections()
