"""What the user has granted: with flags, in a config file of their own, and by where the job file lies."""

from __future__ import annotations

import importlib.machinery
import os
import pwd
import re
import stat
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsjob import document as documents
from dsjob.contract.deepspeed_keys import find_origin
from dsjob.document import Document
from dsjob.document.origins import PROGRAM, Composed
from dsjob.document.places import place_problems
from dsjob.errors import Problem, UsageError
from dsjob.run_folder import RESOLVED_NAME
from dsjob.trust.grant import SHARED, Trust, check_document

_IMPORTABLE = tuple(importlib.machinery.all_suffixes())


@dataclass(frozen=True)
class Flags:
    """What the user says for one job: --trust, --trust-remote-code and --unpinned."""

    prefixes: tuple[str, ...] = ()
    remote_code: bool = False
    unpinned: bool = False


def grant(file: Document | None, flags: Flags = Flags()) -> Trust:
    """The trust for a job file (None: for a recipe), from what the user says and from their config file."""
    folders, rejected = _list_folders(file)
    return Trust(
        prefixes=(*flags.prefixes, *read_prefixes(config_path())),
        folders=folders,
        rejected=rejected,
        local=file is None or not comes_from_elsewhere(file.source),
        remote_code=flags.remote_code,
        unpinned=flags.unpinned,
    )


def read_protocols() -> frozenset[str]:
    """The protocols of URLs that the user's config file grants."""
    return Trust(prefixes=read_prefixes(config_path())).protocols


def _list_folders(file: Document | None) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Where modules that a document names may lie: the current folder, and the job file's own (of a dict: the
    program's that gives it), unless it comes from elsewhere. A run's document names the job file that it was made from,
    whose folder counts. Then the folders of job files that belong to somebody else, which are not searched, each with
    the reason."""
    source: Any = file.source if file is not None else None
    if source == PROGRAM:
        source = find_program()
    here = os.getcwd()
    shared = _find_stranger(here)
    current, rejected = (() if shared else (here,)), ({here: shared} if shared else {})
    if file is not None and os.path.basename(file.source) == RESOLVED_NAME:
        resolved = file.value.get("resolved")
        source = resolved.get("file") if isinstance(resolved, dict) else None
        if isinstance(source, str) and (owner := _find_other_owner(file.source)):
            rejected[os.path.dirname(os.path.abspath(source))] = f"{file.source} belongs to {owner}"
            source = None
    if not isinstance(source, str) or comes_from_elsewhere(source) or not os.path.isfile(source):
        return current, tuple(rejected.items())
    folder = os.path.dirname(os.path.abspath(source))
    if owner := _find_other_owner(source):
        rejected.setdefault(folder, f"{source} belongs to {owner}")
    elif why := _find_stranger(folder):
        rejected[folder] = why
    else:
        current = tuple(dict.fromkeys((*current, folder)))
    return current, tuple(rejected.items())


def _find_stranger(folder: str) -> str:
    """What Python could import from a folder that anybody may write to, such as /tmp, and whom it belongs to; empty
    where it all belongs to the user, to root or to the owner of the folder."""
    status = os.stat(folder)
    if not status.st_mode & stat.S_IWOTH:
        return ""
    trusted = {os.geteuid(), 0, status.st_uid}
    for entry in os.scandir(folder):
        importable = entry.name.endswith(_IMPORTABLE) or (entry.name.isidentifier() and entry.is_dir())
        if importable and os.path.exists(entry) and not {os.lstat(entry).st_uid, os.stat(entry).st_uid} <= trusted:
            return f"{SHARED}, and {entry.name} belongs to {_find_other_owner(entry.path)}"
    return ""


def find_program() -> str | None:
    """The script that this process runs; None for a notebook, a console or a module (`python -m`)."""
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    return os.path.abspath(file) if file and program.__spec__ is None else None


def _find_other_owner(path: str) -> str:
    """Whom a file belongs to, where it is somebody else's."""
    owner = os.stat(path).st_uid if os.path.exists(path) else os.geteuid()
    if owner == os.geteuid():
        return ""
    try:
        return f"the user {pwd.getpwuid(owner).pw_name}"
    except KeyError:
        return f"the user with the id {owner}"


def comes_from_elsewhere(source: str) -> bool:
    """Whether a document may not name local modules: it is read from a URL, lies in a checkpoint's folder, or is a
    run's `resolved.json` that belongs to another user. What the user runs from their own disk else is theirs."""
    if "://" in source:
        return True
    path = os.path.realpath(source)
    folder = os.path.dirname(path)
    if re.fullmatch(r".+-a\d{4,}", os.path.basename(folder)):
        return True
    if all(os.path.lexists(os.path.join(folder, name)) for name in ("manifest.json", "state.json")):
        return True
    return os.path.basename(path) == RESOLVED_NAME and bool(_find_other_owner(path))


def list_untrusted(composed: Composed, resolved: dict[str, Any], trust: Trust) -> list[Problem]:
    """What a document names and `trust` does not grant, with places in `composed`, which it was resolved from."""
    return place_origins(check_document(resolved, trust), composed)


def place_origins(problems: list[Problem], composed: Composed) -> list[Problem]:
    """Problems of a resolved document with their places in `composed`, which it was resolved from."""
    config = composed.document.get("deepspeed", {})
    return place_problems(problems, lambda path: composed.locate(find_origin(path, composed.document, config)))


def config_path() -> str:
    """The user's own config file: `$XDG_CONFIG_HOME/dsjob/config.yaml`."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "dsjob", "config.yaml")


class Granted(NamedTuple):
    """What the user's config file says: `trust` (prefixes), `environment` (variables that any document may read)."""

    trust: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


def read_prefixes(path: str) -> tuple[str, ...]:
    """The list `trust` of the config file at `path`; see `read_config`."""
    return read_config(path).trust


def read_environment() -> tuple[str, ...]:
    """The variables that any document of this user may read; see `read_config`."""
    return read_config(config_path()).environment


def read_config(path: str) -> Granted:
    """The config file at `path`; nothing is granted without a file.

    Raises UsageError where somebody else could have written it: it must belong to the user, and neither it nor its
    folder may be writable by others.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        return Granted()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    with file:
        for place, found in ((path, os.fstat(file.fileno())), (os.path.dirname(path), os.stat(os.path.dirname(path)))):
            if found.st_uid != os.geteuid():
                raise UsageError(f"{place} belongs to another user, so what it trusts is not read", hint=f"rm {path}")
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(f"{place} can be written by others", hint=f"chmod go-w {place}")
        try:
            text = file.read().decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"cannot read {path}: not UTF-8 text (byte {error.start})") from error
    values = documents.parse(text, path).value if text.strip() else {}
    for key, names in values.items():
        known = key in Granted._fields and isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not known:
            hint = "trust: [my_package] and environment: [MY_VARIABLE]"
            raise UsageError(f"{path} may hold lists of dotted names, and nothing else", hint=hint)
    return Granted(**{key: tuple(names) for key, names in values.items()})
