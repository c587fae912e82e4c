"""Where in the user's own code something happened: frames of a stack that are neither dsjob's nor torch's."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import dsjob
from dsjob.contract.environment import mask

TRACEBACK_HINT = "run again with --debug for the traceback"
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(dsjob.__file__)), "")


def list_frames(error: BaseException) -> list[str]:
    """Where an error was raised, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]


def list_users_frames(frames: Sequence[str]) -> list[str]:
    """The frames that are neither dsjob's nor torch's."""
    return [frame for frame in frames if not frame.startswith((_PACKAGE, "<")) and "/torch/" not in frame]


def find_place(frames: Sequence[str]) -> str:
    """The innermost frame that is neither dsjob's nor torch's; the innermost one where there is none."""
    return (list_users_frames(frames) or [*frames, ""])[0]


def describe_failure(error: BaseException) -> str:
    """An error of somebody else's code in one line, with the last place in it that is neither dsjob's nor torch's."""
    users = list_users_frames(list_frames(error))
    place = f" ({users[0]})" if users else ""
    if isinstance(error, SystemExit):
        called = getattr(error, "called", "sys.exit")
        return mask(f"user code called {called}({error.code!r}) before the last step{place}")
    return mask(f"{type(error).__name__}{f': {error}' if str(error) else ''}{place}")
