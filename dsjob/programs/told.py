"""What is told about an exception that a program has not caught: its own traceback, without the frames of dsjob."""

from __future__ import annotations

import os
import sysconfig
import traceback
from dataclasses import replace

import dsjob
from dsjob.errors import DsjobError, Interrupted, Preempted
from dsjob.ranks.failures import Failure
from dsjob.trust.frames import list_frames

_OURS = os.path.join(os.path.dirname(os.path.abspath(dsjob.__file__)), "")
_LIBRARY = sysconfig.get_path("stdlib")
_RUNNER = os.path.join(_LIBRARY, "runpy.py")


def describe(rank: int, error: BaseException, *, debug: bool = False) -> Failure:
    """The record of a rank whose program `error` ended. `debug`: keep the frames of dsjob.

    An error that dsjob raises on purpose says what to do, so without `debug`, only the program's own line is added.
    """
    if not isinstance(error, DsjobError):
        return Failure.of(rank, error, format_traceback(error, debug=debug))
    failure = Failure.of(rank, error)
    if debug:
        more = format_traceback(error, debug=True)
    else:
        line = "" if isinstance(error, (Preempted, Interrupted)) else _find_own_line(error)
        more = line and f"called at {line}"
    return replace(failure, hint="\n  ".join(text for text in (failure.hint, more) if text))


def format_traceback(error: BaseException, *, debug: bool = False) -> str:
    """The traceback as Python prints it, indented to follow a message. `debug`: keep the frames of dsjob."""
    told = traceback.TracebackException.from_exception(error)
    if not debug:
        _drop_frames(told)
    return "".join(told.format()).rstrip().replace("\n", "\n  ")


def _drop_frames(told: traceback.TracebackException | None) -> None:
    """Removes the frames of dsjob and of runpy, also from the causes."""
    if told is None:
        return
    told.stack[:] = [frame for frame in told.stack if not _is_ours(frame.filename)]
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        _drop_frames(other)


def _is_ours(file: str) -> bool:
    return file.startswith((_OURS, "<frozen ")) or file == _RUNNER


def _find_own_line(error: BaseException) -> str:
    """The innermost frame outside installed packages: `file:line in function`; empty if there is none."""
    installed = (_LIBRARY, "<", _OURS)  # "<string>": code that a library generates
    return next(
        (each for each in list_frames(error) if not each.startswith(installed) and "-packages/" not in each), ""
    )
