"""Sources that are no job: what is not there, with what may have been meant, and files of other tools."""

from __future__ import annotations

import os

from dsjob.contract import schema as contract
from dsjob.document import Document
from dsjob.errors import DocumentError, Problem, UsageError

_MOST = 2_000  # names of a folder that are compared


def refuse_missing(source: str) -> UsageError:
    """The error for a path at which there is neither a job file nor a run folder, with the nearest name as its hint."""
    is_file = source.endswith((".json", ".yaml", ".yml", ".jsonc"))
    return UsageError(f"no such file{'' if is_file else ' or run folder'}: {source}", hint=_suggest(source))


def _suggest(source: str) -> str:
    """The path with its first part that does not exist replaced by the name there that comes closest."""
    from dsjob.contract.hints import suggest

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


def require_own(document: Document) -> None:
    """Raises DocumentError for another tool's file: each of its keys would be a mistake."""
    known = {*contract.job_schema()["properties"], *contract.deepspeed_schema()["properties"]}
    keys = document.value.keys()
    if len(keys - known) < 3 or {"model", "data"} & keys:
        return
    from dsjob.importing.sources import name_foreign  # long, and needed for such files alone

    if found := name_foreign(document.value):
        mark, hint = document.mark(()), f"dsjob import {document.source} makes a job document of it"
        message = f"this is not a job document but {found}"
        raise DocumentError([Problem(message, (), "another-tool", hint, document.source, mark.line, mark.column)])
