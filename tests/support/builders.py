"""`dsjob.checkpoint.pretrained.apart` with forks of one process that has imported transformers and peft.

A new process for each question would import both again, which takes six seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from forks import begin_anew, get_forks

from dsjob.checkpoint.pretrained import apart


@pytest.fixture(scope="session")
def builder() -> Iterator[Connection]:
    """Takes an environment, the arguments of `apart.main` and its input; gives exit code, stdout and stderr."""
    ours, theirs = get_forks().Pipe()
    process = get_forks().Process(target=_serve, args=(theirs, {**os.environ, **apart._OFFLINE}), daemon=True)
    process.start()
    theirs.close()  # else the server would not see that we are gone
    yield ours
    process.kill()


@pytest.fixture
def forked_builds(builder: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what this process asks `apart` answered by such forks."""

    def run(command: list[str], *, input: bytes, env: Mapping[str, str], timeout: float, **_: object) -> Any:  # noqa: A002
        assert command[1:4] == ["-P", "-m", apart.__name__]
        builder.send((dict(env), [int(word) for word in command[4:]], input))
        assert builder.poll(timeout), "no answer"
        code, out, err = builder.recv()
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(apart, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))


def _serve(asked: Connection, environment: dict[str, str]) -> None:
    begin_anew(environment)
    from dsjob.checkpoint.pretrained import architecture

    architecture.import_libraries()
    while True:
        try:
            given = asked.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            pid = os.fork()
            if pid == 0:
                _answer(folder, *given)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            asked.send((code, *(Path(folder, name).read_bytes() for name in ("stdout", "stderr"))))


def _answer(folder: str, environment: dict[str, str], limits: list[int], question: bytes) -> NoReturn:
    try:
        begin_anew(environment)
        Path(folder, "stdin").write_bytes(question)
        sys.stdin = open(f"{folder}/stdin")  # noqa: SIM115
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        apart.main(*limits)
        sys.stderr.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
