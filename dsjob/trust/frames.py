"""Finds the place in the user's own code where something happened: stack frames that are neither dsjob's nor
torch's."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import dsjob
from dsjob.contract.masking import mask
from dsjob.errors import DsjobError, name_target

# Attributes of errors that the user's own code raises: the target's path, its place, and the file with the traceback.
_PATH, _PLACE, _TRACEBACK = "_dsjob_path", "_dsjob_place", "_dsjob_traceback"
TRACEBACK_HINT = "run again with --debug for the traceback"
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(dsjob.__file__)), "")


def list_frames(error: BaseException) -> list[str]:
    """The frames of an error's traceback, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]


def list_users_frames(frames: Sequence[str]) -> list[str]:
    """The frames that are neither dsjob's nor torch's."""
    return [frame for frame in frames if not frame.startswith((_PACKAGE, "<")) and "/torch/" not in frame]


def find_place(frames: Sequence[str]) -> str:
    """The innermost frame that is neither dsjob's nor torch's; if there is none, the innermost frame."""
    return (list_users_frames(frames) or [*frames, ""])[0]


def hint_at_failure(error: BaseException) -> str:
    """What to do about an error of user code."""
    kept = getattr(error, _TRACEBACK, "")
    more = f"the traceback is in {kept}" if kept else TRACEBACK_HINT
    # torch raises OutOfMemoryError on GPUs, and a RuntimeError with these words on the CPU.
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in read_message(error):
        return f"lower trainer.micro_batch, or see what fits with `dsjob plan`; {more}"
    return more


def needs_traceback(error: BaseException) -> bool:
    """Whether an error comes from user code, so that its message alone may not show the cause."""
    return TRACEBACK_HINT in error.hint if isinstance(error, DsjobError) else True


def point_to_traceback(error: BaseException, file: str) -> None:
    """Makes the hint of an error name the file that has its traceback."""
    if isinstance(error, DsjobError):
        error.hint = error.hint.replace(TRACEBACK_HINT, f"the traceback is in {file}")
    else:
        setattr(error, _TRACEBACK, file)


def describe_failure(error: BaseException) -> str:
    """An error of user code on one line, with the innermost place that is neither dsjob's nor torch's."""
    users = list_users_frames(list_frames(error))
    place = f" ({users[0]})" if users else ""
    blamed = getattr(error, _PLACE, "")
    if isinstance(error, SystemExit):
        called = getattr(error, "called", "sys.exit")
        return mask(f"user code called {called}({error.code!r}) before the last step{place}")
    told = f"{blamed}: " if blamed else ""
    text = read_message(error)
    return mask(f"{told}{type(error).__name__}{f': {text}' if text else ''}{place}")


def read_message(error: BaseException) -> str:
    """The text of an error; for one whose `__str__` fails, a note of that."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be shown: __str__ raised {type(failure).__name__})"


def put_at(error: BaseException, path: tuple[str | int, ...]) -> None:
    """Notes on an error of any type which target of the document has raised it, unless that is known."""
    if isinstance(error, DsjobError):
        error.put_at(path)
    elif path and not find_path(error):
        setattr(error, _PATH, path)
        setattr(error, _PLACE, name_target(path))


def find_path(error: BaseException) -> tuple[str | int, ...]:
    """The place in the document that is at fault for an error; empty where none is known to be."""
    found: tuple[str | int, ...] = error.path if isinstance(error, DsjobError) else getattr(error, _PATH, ())
    return found


def drop_path(error: BaseException) -> None:
    """Forgets the place in the document; the message still begins with the path."""
    if isinstance(error, DsjobError):
        error.path = ()
    elif hasattr(error, _PATH):
        delattr(error, _PATH)


def tell_place(error: BaseException, place: str) -> None:
    """Says in an error that has a path where that is: `file:line:column`, or what gives the value instead."""
    if isinstance(error, DsjobError):
        error.message = f"{place}: {error.message}"
    else:
        setattr(error, _PLACE, f"{place}: {getattr(error, _PLACE)}")
        error.add_note(f"raised by {getattr(error, _PLACE)}")  # for who sees the traceback
