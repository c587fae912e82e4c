"""Shell completion of command names. Hydra, which knows the keys of a job, completes everything after them."""

from __future__ import annotations

import os
from collections.abc import Sequence


def complete_command(commands: Sequence[str]) -> list[str]:
    """The commands that complete the word being typed, if it is the first word after `dsjob`.

    Shells pass the line in COMP_LINE. After a command, this removes the command from the line and leaves the rest to
    Hydra, which would take the command for an override.
    """
    program, _, typed = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    first, space, rest = typed.lstrip().partition(" ")
    if not space:
        return [command for command in commands if command.startswith(first)]
    if first in commands:
        os.environ["COMP_LINE"] = f"{program} {rest}"
    return []
