"""A proxy on loopback before an S3 server that does to requests what networks and busy stores do."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from s3 import forget_connections, shorten_waits

ERRORS = {
    "403": ("AccessDenied", "access denied"),
    "409": ("ConditionalRequestConflict", "a conflicting conditional operation is under way"),
    "412": ("PreconditionFailed", "at least one precondition did not hold"),
    "503": ("SlowDown", "please reduce your request rate"),
}
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
KINDS = ["409", "412", "503", "drop", "hang", "lost", "cut", "short", "flip"]


@dataclass
class Fault:
    """`kind` for the next `times` requests of a method whose path has `part` in it, after `skip` that pass.

    A status answers in the server's place; drop and hang never reach it; lost does, and its answer does not come back;
    cut ends an answer before its end, short says that it is shorter than it is, flip changes one bit of it. kill ends
    the store's `victim` before the request is carried out, killed after it; stop and stopped stop it there, and what is
    left of the request is done once `go_on` is set.
    """

    kind: str
    methods: tuple[str, ...]
    part: str
    times: int
    skip: int = 0

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and method in self.methods and self.part in path


class FaultyStore:
    """The proxy: `faults` may change while it serves, `seen` has each request's method and path."""

    def __init__(self, server: str) -> None:
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.victim = 0
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.over = threading.Event()
        target = urlsplit(server)
        assert target.hostname
        self._host, self._port = target.hostname, target.port
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._proxy.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        threading.Thread(target=self._proxy.serve_forever, args=(0.01,), daemon=True).start()  # looks for its end

    def fail(self, kind: str, *methods: str, part: str = "", times: int = 1, skip: int = 0) -> Fault:
        """Adds a fault to be done; of all methods where none is named."""
        fault = Fault(kind, methods or METHODS, part, times, skip)
        self.faults.append(fault)
        return fault

    def strike(self, number: int) -> None:
        """Sends a signal to the victim, and waits where it is one to stop."""
        assert self.victim
        os.kill(self.victim, number)
        if number == signal.SIGSTOP:
            self.waiting.set()
            self.go_on.wait(60)

    def close(self) -> None:
        self.over.set()
        self.go_on.set()
        self._proxy.shutdown()
        self._proxy.server_close()

    def take_fault(self, method: str, path: str) -> str:
        with self._lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.matches(method, path) and fault.skip:
                    fault.skip -= 1
                elif fault.matches(method, path):
                    fault.times -= 1
                    return fault.kind
        return ""

    def forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=60)
        headers = {key: value for key, value in handler.headers.items() if key.lower() != "connection"}
        connection.request(handler.command, handler.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer, data

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the body of an answer waits 40 ms for the client to confirm its head

            def log_message(self, *arguments: object) -> None:
                pass

            def drop(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def handle_one(self) -> None:
                if self.headers.get("expect", "").lower() == "100-continue":
                    pass  # the base class has answered already
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                kind = store.take_fault(self.command, self.path)
                if kind in ERRORS:
                    code, message = ERRORS[kind]
                    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                    self.answer(int(kind), {"content-type": "application/xml"}, text)
                    return
                if kind == "hang":
                    store.over.wait(30)
                if kind in ("kill", "stop"):
                    store.strike(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                if kind in ("drop", "hang", "kill"):
                    self.drop()
                    return
                found, data = store.forward(self, body)
                if kind in ("killed", "stopped"):
                    store.strike(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
                if kind in ("lost", "killed"):
                    self.drop()
                    return
                headers = {k: v for k, v in found.getheaders() if k.lower() not in HOP}
                headers, data = _spoil(kind, headers, data)
                length = found.getheader("content-length") if self.command == "HEAD" else None
                self.answer(found.status, headers, data, cut=kind == "cut", length=length)

            def answer(
                self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False, length: str | None = None
            ) -> None:
                self.send_response_only(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("content-length", length or str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.wfile.flush()
                    self.drop()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one  # noqa: N815

        return Handler


HOP = ("connection", "content-length", "transfer-encoding")


def _spoil(kind: str, headers: dict[str, str], data: bytes) -> tuple[dict[str, str], bytes]:
    """An answer as a store sends it that has no checksums, by which the client would know."""
    if kind not in ("flip", "short"):
        return headers, data
    headers = {k: v for k, v in headers.items() if not k.lower().startswith("x-amz-checksum")}
    half = len(data) // 2
    if kind == "flip" and data:
        return headers, data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
    return headers, data[:half]


@contextmanager
def faulty_store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """The proxy before `server`, in its place for everything in this process that asks for S3."""
    store = FaultyStore(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    shorten_waits(monkeypatch)
    try:
        yield store
    finally:
        store.close()
        monkeypatch.undo()
        forget_connections()
