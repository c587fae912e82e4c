"""Rejects sources that are not jobs: missing files, with a suggestion, and files of other tools."""

from __future__ import annotations

import os

from dsjob.contract import schema as contract
from dsjob.document import Document
from dsjob.errors import DocumentError, Problem, UsageError
from dsjob.terminal import quote_path

_MOST = 2_000  # names of a folder that are compared


def refuse_missing(source: str) -> UsageError:
    """The error for a path without a job file or run folder. Its hint suggests the closest existing name."""
    is_file = source.endswith((".json", ".yaml", ".yml", ".jsonc"))
    return UsageError(f"no such file{'' if is_file else ' or run folder'}: {source}", hint=_suggest(source))


def _suggest(source: str) -> str:
    """The path with its first missing part replaced by the closest existing name."""
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
    return f"available: {', '.join(there[:8])}{', ...' if there[8:] else ''}" if above and there else ""


def require_own(document: Document) -> None:
    """Raises DocumentError for another tool's file, instead of one error for each of its keys."""
    known = {*contract.job_schema()["properties"], *contract.deepspeed_schema()["properties"]}
    keys = document.value.keys()
    if len(keys - known) < 3 or {"model", "data"} & keys:
        return
    from dsjob.importing.sources import name_foreign  # a large import that only such files need

    if found := name_foreign(document.value):
        mark, hint = document.mark(()), f"convert it to a job document: dsjob import {quote_path(document.source)}"
        message = f"this is not a job document but {found}"
        raise DocumentError([Problem(message, (), "another-tool", hint, document.source, mark.line, mark.column)])
