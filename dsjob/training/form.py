"""The form in which a run shows itself: lines, JSON, or nothing but problems. Chosen by the command's flags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Form = Literal["", "json", "quiet"]  # empty: lines, or a progress bar on a terminal
_VARIABLE = "DSJOB_FORM"  # set by the command, also for the processes of its ranks


def read_form() -> Form:
    """The form that the command has chosen."""
    form = os.environ.get(_VARIABLE)
    return "json" if form == "json" else "quiet" if form == "quiet" else ""


@contextmanager
def showing(form: Form) -> Iterator[None]:
    """Runs in the block show themselves in this form."""
    before = os.environ.pop(_VARIABLE, None)
    try:
        if form:
            os.environ[_VARIABLE] = form
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if before is not None:
            os.environ[_VARIABLE] = before
