"""Adds the file, line and column of a value to errors about its place in the document."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsjob.document.origins import PROGRAM, Composed
from dsjob.errors import DocumentError, Problem, TargetError
from dsjob.trust.frames import find_path, tell_place
from dsjob.trust.user import place_origins


@contextmanager
def placing_errors(composed: Composed) -> Iterator[None]:
    """Adds the place in `composed` to errors that carry a path in the document.

    A TargetError becomes a DocumentError, because the document is wrong. All other errors keep their type, including
    those of the user's own code.
    """
    try:
        yield
    except TargetError as error:
        if not error.path:
            raise
        raise DocumentError(place_origins([error.to_problem()], composed)) from error
    except Exception as error:
        if path := find_path(error):
            (found,) = place_origins([Problem("", path, "target")], composed)
            tell_place(error, PROGRAM if found.source == PROGRAM else found.place)
        raise
