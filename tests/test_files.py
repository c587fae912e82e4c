"""Files that somebody else has placed: no pipe is waited for, nothing is written through a link."""

import errno
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsjob import storage
from dsjob.errors import StorageError
from dsjob.files import explained, open_append, open_update, read_lines_backwards, require_own
from dsjob.trust.grant import Trust, check_document


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "resolved.json")
    with pytest.raises(StorageError, match="not a regular file"):
        storage.read_text(str(tmp_path / "resolved.json"))


@pytest.mark.parametrize(("code", "advised"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_an_error_of_writing_names_the_file(code: int, advised: bool) -> None:
    with (
        pytest.raises(StorageError, match="cannot write run/metrics") as caught,
        explained("run/metrics.jsonl"),
    ):
        raise OSError(code, os.strerror(code))
    assert os.strerror(code) in str(caught.value)
    assert ("free some space" in caught.value.hint) == advised


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "log")
    for refuse in (open_append, open_update, require_own):
        with pytest.raises(StorageError, match="is a symbolic link"):
            refuse(str(tmp_path / "log"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_models_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    model = {"_target_": "transformers.AutoModel.from_pretrained", "_args_": [str(tmp_path)]}
    assert "is a pipe" in check_document({"model": model}, Trust())[0].message


@pytest.mark.parametrize("dripping", [False, True])
def test_a_web_server_may_not_take_for_ever(dripping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PATIENCE", 1)
    ended = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if dripping:
                self.send_response(200)
                self.end_headers()
            while not ended.wait(0.1):
                if dripping:
                    self.wfile.write(b"#")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(StorageError, match="no complete answer within 1 s"):
            storage.read_text(f"http://127.0.0.1:{server.server_port}/cfg.json", limit=1 << 24)
    finally:
        ended.set()
        server.shutdown()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nbc", "\na\n\nbc\n", "abcdefghi\nk\nlmnopqrstuvw\n"])
def test_lines_are_read_backwards(tmp_path: Path, text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsjob.files._BLOCK", size)
    (tmp_path / "file").write_text(text)
    with open_update(str(tmp_path / "file")) as file:
        found = list(read_lines_backwards(file))
    assert [line.decode() for _, line in reversed(found)] == [line for line in text.split("\n") if line]
    assert all(text.encode()[offset:].startswith(line) for offset, line in found)
