"""Shell completion: the names of commands; what follows them Hydra completes, which knows the keys of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence


def complete_command(commands: Sequence[str]) -> list[str]:
    """The commands that the word being typed may become, where it is the first after `dsjob`.

    Shells give the line in COMP_LINE. Behind a command it is left to Hydra without that word, which is no override.
    """
    program, _, typed = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    first, space, rest = typed.lstrip().partition(" ")
    if not space:
        return [command for command in commands if command.startswith(first)]
    if first in commands:
        os.environ["COMP_LINE"] = f"{program} {rest}"
    return []
