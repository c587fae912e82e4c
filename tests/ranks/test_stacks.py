"""The stacks of ranks that hang or crash, as they are shown."""

import os

import dsjob
from dsjob.programs import rank
from dsjob.ranks.stalls import show_stack


def test_the_stack_of_a_program_begins_in_the_program() -> None:
    runner = os.path.relpath(str(rank.__file__), os.path.dirname(os.path.dirname(str(dsjob.__file__))))
    started = [f"/site-packages/{runner}:64 in main", "<frozen runpy>:88 in _run_code"]
    shown = show_stack(1, ["train.py:9 in fail", "train.py:20 in <module>", *started])
    assert shown.splitlines()[1:] == ["    train.py:9 in fail", "    train.py:20 in <module>"]
    assert show_stack(1, started) == ""  # a program that has not begun
