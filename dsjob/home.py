"""Locates this installation of dsjob, so that new processes run the same one."""

from __future__ import annotations

import os
import sys

from dsjob import CLONE


def find_again() -> dict[str, str]:
    """Environment variables that let a new Python process import the same dsjob as this process.

    Only a clone of the repository needs them. Python found it through the current folder, which `-P` keeps off the new
    process's path, or through a change to `sys.path`.
    """
    if CLONE is None or str(CLONE) not in {os.path.realpath(folder) for folder in sys.path}:
        return {}
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(CLONE), *([inherited] if inherited else [])])}
