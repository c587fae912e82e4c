"""Files and run folders that are not there, and what may have been meant."""

from __future__ import annotations

import os

from dsjob.errors import UsageError

_MOST = 2_000  # names of a folder that are compared


def refuse_missing(source: str) -> UsageError:
    """The error for a path at which there is neither a job file nor a run folder, with the nearest name as its hint."""
    is_file = source.endswith((".json", ".yaml", ".yml", ".jsonc"))
    return UsageError(f"no such file{'' if is_file else ' or run folder'}: {source}", hint=_suggest(source))


def _suggest(source: str) -> str:
    """The path with its first part that does not exist replaced by the name there that comes closest."""
    from dsjob.check import suggest

    above, name = os.path.split(source.rstrip("/"))
    rest = ""
    while above and not os.path.isdir(above):
        rest = os.path.join(name, rest) if rest else name
        above, name = os.path.split(above)
    try:
        there = sorted(os.listdir(above or "."))[:_MOST]
    except OSError:
        return ""
    for rest_of in dict.fromkeys((rest, "")):
        meant = {
            known: os.path.join(above, known, rest_of) if rest_of else os.path.join(above, known) for known in there
        }
        if hint := suggest(name, [known for known in there if os.path.exists(meant[known])]):
            return next(f'did you mean "{path}"?' for known, path in meant.items() if f'"{known}"' in hint)
    return f"there are: {', '.join(there[:8])}{', ...' if there[8:] else ''}" if above and there else ""
