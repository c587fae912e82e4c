"""Processes that begin where torch and dsjob are imported: forks of one that has done nothing else.

Each is as good as a new interpreter, without the seconds that importing takes.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing import connection, forkserver, get_context, parent_process, set_start_method
from multiprocessing.context import ForkServerContext

import pytest

import dsjob

_starting = threading.Lock()
_SUPPORT = os.path.dirname(__file__)
_HOME = os.path.dirname(os.path.dirname(dsjob.__file__))


def get_forks() -> ForkServerContext:
    """multiprocessing, with processes that are such forks."""
    with _starting:
        _start_server()
    return get_context("forkserver")


@cache  # once: a thread that starts a program copies the environment, which is another one meanwhile
def _start_server() -> None:
    get_context("forkserver").set_forkserver_preload(["warmed"])
    # The server imports the same dsjob as this process: in a worktree, that is not the installed one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSAFEPATH", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join((_SUPPORT, _HOME)))
        patch.setenv("HF_HUB_OFFLINE", "1")  # transformers reads it when it is imported
        forkserver.ensure_running()


def begin_anew(environment: Mapping[str, str]) -> None:
    """Gives this process the environment and nothing else. What torch reads at its import it has read before."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # else that of the process that was forked
    set_start_method(None, force=True)  # a fork's own children would be such forks, but without anything imported


def end_with_pytest() -> None:
    """Ends this process once pytest is gone. The system would tell its parent's death, but that is another process."""
    pytest = parent_process()
    assert pytest is not None
    connection.wait([pytest.sentinel])
    os._exit(1)
