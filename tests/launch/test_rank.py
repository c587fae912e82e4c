"""What the process of a rank changes for itself."""

from __future__ import annotations

import warnings

import pytest

import dsjob
from dsjob.launch.rank import shorten_warnings


def test_warnings_of_dsjob_take_one_line_and_others_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = warnings.formatwarning
    monkeypatch.setattr(warnings, "formatwarning", usual)  # put back at the end
    shorten_warnings()
    assert warnings.formatwarning("no disk", UserWarning, dsjob.__file__, 1) == "dsjob: warning: no disk\n"
    others = "late", UserWarning, "my_model.py", 7
    assert warnings.formatwarning(*others) == usual(*others)
