"""Turns calls of sys.exit and os._exit in the user's own code into errors that name the place of the call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from dsjob.errors import ExitError
from dsjob.terminal import write_now
from dsjob.trust.frames import describe_failure


class _Exit(SystemExit):
    """The exception that replaces a call of os._exit."""

    called = "os._exit"


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Turns SystemExit, and a call of `os._exit` on this thread, into ExitError.

    On other threads `os._exit` still ends the process, because this thread may hang, but never with exit code 0.
    Child processes are not affected. A call of `exit` in a C library cannot be caught here.
    """
    leave, owner, thread = os._exit, os.getpid(), threading.get_ident()
    over = threading.Event()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        if over.is_set():  # an exit handler of the user's own has kept this function beyond the block
            os._exit(status)
        if threading.get_ident() == thread:
            raise _Exit(status)
        write_now(f"dsjob: error: a thread called os._exit({status}) before the last step")
        leave(status or 1)

    refuse.refuses = True  # type: ignore[attr-defined]
    if not hasattr(leave, "refuses"):
        os._exit = refuse
    try:
        yield
    except SystemExit as error:
        raise ExitError(describe_failure(error), hint="to report a problem, raise an exception") from error
    finally:
        os._exit = leave
        over.set()


def keep_exit_code(code: int) -> None:
    """Keeps exit handlers of this process, which has failed, from changing its exit code with `os._exit`."""
    leave, owner = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        sys.stdout.flush()
        leave(code if os.getpid() == owner else status)

    os._exit = end
