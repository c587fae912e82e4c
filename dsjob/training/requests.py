"""What callbacks and the file `stop-now` have asked of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Requests:
    """This rank's open requests. `Occasions` combines them with those of other ranks.

    stops: the reason to end the run, or empty. ended: the reason that all ranks have agreed on.
    """

    saves: bool = False
    evaluates: bool = False
    stops: str = ""
    ended: str = ""
