"""Collects what the user has granted: with flags, in their config file, and by the location of the job file."""

from __future__ import annotations

import importlib.machinery
import os
import stat
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsjob import document as documents
from dsjob.contract.access import RESOLVED_NAME, comes_from_elsewhere, find_other_owner, is_foreign, list_folders
from dsjob.contract.deepspeed_keys import find_origin
from dsjob.document import Document
from dsjob.document.origins import PROGRAM, Composed
from dsjob.document.places import place_problems
from dsjob.errors import Problem, UsageError
from dsjob.terminal import quote_path
from dsjob.trust.grant import SHARED, Trust, check_document

_IMPORTABLE = tuple(importlib.machinery.all_suffixes())


@dataclass(frozen=True)
class Flags:
    """The trust flags for one job: --trust, --trust-remote-code and --unpinned."""

    prefixes: tuple[str, ...] = ()
    remote_code: bool = False
    unpinned: bool = False


def grant(file: Document | None, flags: Flags = Flags()) -> Trust:
    """The trust for a job file (None: for a recipe), from the flags and from the user's config file.

    What the user names on the command line is added by `named.name_places`, once the document is composed."""
    folders, rejected = _list_folders(file)
    granted, source = read_config(config_path()), file.source if file is not None else ""
    return Trust(
        prefixes=(*flags.prefixes, *granted.trust),
        folders=folders,
        rejected=rejected,
        local=file is None or not comes_from_elsewhere(file.source),
        remote_code=flags.remote_code,
        unpinned=flags.unpinned,
        places=list_folders(source),
        foreign=is_foreign(source),
        # Variables that the user lets documents read are places that the user has chosen.
        reads=tuple(filter(None, (os.environ.get(name) for name in granted.environment))),
    )


def read_granted() -> tuple[str, ...]:
    """What the user's config file trusts."""
    return Trust(prefixes=read_prefixes(config_path())).prefixes


def _list_folders(file: Document | None) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The folders in which a document may name modules, and the folders that are not searched, each with the reason.

    The first are the current folder and the job file's folder, unless the document comes from elsewhere. For a dict,
    the folder is that of the program that passes it; for a run's document, that of its original job file. The second
    are folders of job files that belong to another user, and folders that anyone can write to if another user's modules
    are in them."""
    source: Any = file.source if file is not None else None
    if source == PROGRAM:
        source = find_program()
    here = os.getcwd()
    shared = _find_stranger(here)
    current, rejected = (() if shared else (here,)), ({here: shared} if shared else {})
    if file is not None and os.path.basename(file.source) == RESOLVED_NAME:
        resolved = file.value.get("resolved")
        source = resolved.get("file") if isinstance(resolved, dict) else None
        if isinstance(source, str) and (owner := find_other_owner(file.source)):
            rejected[os.path.dirname(os.path.abspath(source))] = f"{file.source} belongs to {owner}"
            source = None
    if not isinstance(source, str) or comes_from_elsewhere(source) or not os.path.isfile(source):
        return current, tuple(rejected.items())
    folder = os.path.dirname(os.path.abspath(source))
    if owner := find_other_owner(source):
        rejected.setdefault(folder, f"{source} belongs to {owner}")
    elif why := _find_stranger(folder):
        rejected[folder] = why
    else:
        current = tuple(dict.fromkeys((*current, folder)))
    return current, tuple(rejected.items())


def _find_stranger(folder: str) -> str:
    """Names a module of another user in a folder that anyone can write to, such as /tmp. Empty if others cannot write
    to the folder, or if all modules in it belong to this user, to root or to the owner of the folder."""
    status = os.stat(folder)
    if not status.st_mode & stat.S_IWOTH:
        return ""
    trusted = {os.geteuid(), 0, status.st_uid}
    for entry in os.scandir(folder):
        importable = entry.name.endswith(_IMPORTABLE) or (entry.name.isidentifier() and entry.is_dir())
        if importable and os.path.exists(entry) and not {os.lstat(entry).st_uid, os.stat(entry).st_uid} <= trusted:
            return f"{SHARED}, and {entry.name} belongs to {find_other_owner(entry.path)}"
    return ""


def find_program() -> str | None:
    """The script that this process runs; None for a notebook, a console or a module (`python -m`)."""
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    return os.path.abspath(file) if file and program.__spec__ is None else None


def list_untrusted(composed: Composed, resolved: dict[str, Any], trust: Trust) -> list[Problem]:
    """Problems with everything that a document names and `trust` does not grant, with places from `composed`, the
    document before it was resolved."""
    return place_origins(check_document(resolved, trust), composed)


def place_origins(problems: list[Problem], composed: Composed) -> list[Problem]:
    """Problems of a resolved document, with places from `composed`, the document before it was resolved."""
    config = composed.document.get("deepspeed", {})
    return place_problems(problems, lambda path: composed.locate(find_origin(path, composed.document, config)))


def config_path() -> str:
    """The user's own config file: `$XDG_CONFIG_HOME/dsjob/config.yaml`."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "dsjob", "config.yaml")


class Granted(NamedTuple):
    """The contents of the user's config file: `trust` (prefixes), `environment` (variables that documents may read)."""

    trust: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


def read_prefixes(path: str) -> tuple[str, ...]:
    """The list `trust` of the config file at `path`; see `read_config`."""
    return read_config(path).trust


def read_environment() -> tuple[str, ...]:
    """The variables that any document of this user may read; see `read_config`."""
    return read_config(config_path()).environment


def read_config(path: str) -> Granted:
    """Reads the config file at `path`; without a file, nothing is granted.

    Raises UsageError if another user could have written it: it must belong to the user, and neither the file nor its
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
                raise UsageError(
                    f"{place} belongs to another user, so dsjob does not read it", hint=f"rm {quote_path(path)}"
                )
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(f"{place} is writable by others", hint=f"chmod go-w {quote_path(place)}")
        try:
            text = file.read().decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"cannot read {path}: not UTF-8 text (byte {error.start})") from error
    values = documents.parse(text, path).value if text.strip() else {}
    for key, names in values.items():
        known = key in Granted._fields and isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not known:
            hint = "trust: [my_package] and environment: [MY_VARIABLE]"
            raise UsageError(f"{path} may only contain lists of names", hint=f"for example {hint}")
    return Granted(**{key: tuple(names) for key, names in values.items()})
