"""An S3 server of its own process on loopback, for tests; ranks and killed processes reach it by the environment."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import botocore.loaders
import fsspec
import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
# What a test of a broken connection would otherwise wait for.
HURRIED = {"config_kwargs": {"read_timeout": 1, "connect_timeout": 2, "retries": {"max_attempts": 1}}}
_read_file = botocore.loaders.JSONFileLoader().load_file
# Each connection would parse the description of S3 anew, in half of its time.
botocore.loaders.JSONFileLoader.load_file = staticmethod(functools.cache(_read_file))  # type: ignore[method-assign]


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The server's URL; the environment names it and has credentials for it while it runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < end, "the S3 server does not start"
            assert server.poll() is None, "the S3 server has ended"
            time.sleep(0.05)
    changed = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    forget_connections()
    yield changed["AWS_ENDPOINT_URL"]
    for key, value in before.items():
        os.environ.pop(key)
        if value is not None:
            os.environ[key] = value
    server.terminate()
    server.wait()


@pytest.fixture
def s3(s3_server: str) -> str:
    """The URL of an empty folder in a new bucket."""
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").call_s3("create_bucket", Bucket=bucket)
    return f"s3://{bucket}/root"


def shorten_waits(patch: pytest.MonkeyPatch) -> None:
    """For connections made from now on: time-outs as in HURRIED, and next to no pause before botocore tries again."""
    patch.setitem(fsspec.config.conf, "s3", HURRIED)
    patch.setattr("botocore.retryhandler.delay_exponential", lambda **_: 0.01)
    forget_connections()


def forget_connections() -> None:
    """Makes the next use of S3 read the environment anew."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
