"""Whether the targets of a document exist, judged by files and their text. Imports nothing of them."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from dsjob.contract.hints import suggest
from dsjob.contract.paths import Path
from dsjob.errors import Problem
from dsjob.trust.grant import Trust, explain_rejected, find_top, locate_local

_ADVICE = "modules in the current folder or beside the job file can be named; an installed package with --trust"
# With any of these, a module may have names that do not occur in its text, and a package modules of other folders.
_DYNAMIC = re.compile(
    r"import\s*\*|__getattr__|globals\b|locals\(|setattr\(|vars\(|__dict__|exec\(|sys\.modules|__path__"
)
_DEFINED = re.compile(r"^(?:class |def |async def )?([A-Za-z]\w*)\b(?=\s*[(:=])", re.MULTILINE)


def find_absent(value: Any, trust: Trust, path: Path = ()) -> Iterator[Problem]:
    """Warnings for targets that a run would not find: another machine may have them."""
    if isinstance(value, Mapping):
        target = value.get("_target_")
        if isinstance(target, str):
            message, hint = explain_absent(target, trust)
            if message:
                message = f"cannot import {target}: {message}"
                yield Problem(message, (*path, "_target_"), "not-found", hint, severity="warning")
        for key, item in value.items():
            yield from find_absent(item, trust, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from find_absent(item, trust, (*path, index))


def explain_absent(path: str, trust: Trust) -> tuple[str, str]:
    """Why there is no such target, and a hint. Both are empty if it exists, or if only an import would show it."""
    parts = path.split(".")
    spec = find_top(parts[0], trust.folders)
    if spec is None:
        return ("", "") if explain_rejected(path, trust) else explain_no_module(parts[0], trust)
    if not locate_local(spec, trust.folders):
        return "", ""  # of installed packages, many compute their names
    for length, name in enumerate(parts[1:], start=1):
        inside = spec.submodule_search_locations
        # By its last name: for a full one, a folder without __init__.py looks for its parent among loaded modules.
        below = PathFinder.find_spec(name, list(inside)) if inside is not None else None
        message, hint = _look_into(spec, ".".join(parts[:length]), name)
        if below is None:
            return message, hint
        if length == len(parts) - 1 and not message:
            return "", ""  # a package may import a function that has the name of its module
        spec = below
    return f"{path} is a module", "name a class or function in it: module.name"


def explain_no_module(top: str, trust: Trust) -> tuple[str, str]:
    """The message and hint for a top-level module that Python cannot find."""
    found = [module.name for module in pkgutil.iter_modules([*trust.folders])]
    return f"there is no module {top!r}", suggest(top, found) or _ADVICE


def _look_into(spec: ModuleSpec, owner: str, name: str) -> tuple[str, str]:
    """The message and hint for a `name` that occurs nowhere in the text of the module `owner`."""
    text = ""
    if spec.origin is not None:  # a folder without __init__.py has none, and no names but its modules
        if not spec.origin.endswith(".py"):
            return "", ""
        try:
            with open(spec.origin, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            return "", ""
    if re.search(rf"(?<!\.)\b{re.escape(name)}\b", text) or _DYNAMIC.search(text):
        return "", ""
    known = [
        *_DEFINED.findall(text),
        *(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)),
    ]
    return f"{owner} has no {name!r}", suggest(name, known)
