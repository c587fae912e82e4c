"""The places that the arguments of a target name: files and folders that its constructor may open.

Any text may be a path, so each is judged that leads to something. What libraries expand to paths, such as patterns, is
judged as far as a text shows it; `data_folders` looks into the folders before they are read.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.contract.access import ALLOWED, Access, is_hidden, list_real_paths
from dsjob.contract.locations import GRANT_FOLDER, Refusal, find_protocol, is_written, shorten
from dsjob.contract.paths import Path
from dsjob.errors import Problem
from dsjob.terminal import quote_word

MAGIC = re.compile(r"[*?\[{]")
_KERNEL = ("proc", "dev", "sys")  # folders whose files expose the state of processes and devices
# Arguments that name folders, even if the text could be something else: a separator, for example.
_FOLDERS = (
    "path", "data_dir", "data_files", "dataset_path", "source", "_args_", "pretrained", "tokenizer", "config",
    "pretrained_model_name_or_path", "subfolder",
)  # fmt: skip
_SHORT = ("/", "~", ".", "..")
_PATTERNS = re.compile(r"datasets\.\w+|.*\.load_dataset")  # targets that expand patterns
ROWS = ("datasets.Dataset.from_dict", "datasets.Dataset.from_list")  # their arguments are data, not paths
_KERNEL_FILE: Refusal = ("kernel-file", "may name files in /proc, /dev or /sys", "use a file or folder with data")


def check_places(value: Mapping[str, Any], path: Path, access: Access) -> Iterator[Problem]:
    """Problems with the local places that the arguments of a target let it read, not including nested targets. `path`:
    its place."""
    target = str(value["_target_"])
    if target in ROWS:
        return
    bases, patterns = _list_bases(value), bool(_PATTERNS.match(target))
    sound = [base for base in bases if not base or not access.explain(base)[0]]  # others are reported at their own keys
    for place, item in list_arguments(value):
        if isinstance(item, str) and place[-1] != "_target_" and not is_written(place[-1]):
            folder = place[0] in _FOLDERS
            rule, message, hint = _explain(item, folder, bases if folder else sound, access, patterns=patterns)
            if rule:
                yield Problem(f"{shorten(item)}: {message}", (*path, *place), rule, hint)


def list_arguments(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All values in the arguments with their places, except inside nested targets."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        if not (isinstance(item, Mapping) and "_target_" in item):
            yield from list_arguments(item, (*path, key))


def _explain(text: str, folder: bool, bases: list[str], access: Access, *, patterns: bool) -> Refusal:
    local = strip(text)
    if not local or (text in _SHORT and not folder):
        return ALLOWED
    for one in (os.path.join(base, local) for base in bases):
        if _names_kernel(one) or (folder and list_real_paths(one) == ["/"]):
            return _KERNEL_FILE
        place = one
        if patterns and folder and MAGIC.search(one):
            place, rest = split_pattern(one)
            if any(is_hidden(part) or part == ".." for part in rest):
                return "private-file", "a pattern may name no hidden files, and may not go up", "name a folder"
        refusal = access.explain(place) if os.path.lexists(place) else ALLOWED
        if refusal[0]:
            return refusal
    return ALLOWED


def check_written(value: Any, path: Path, access: Access) -> Iterator[Problem]:
    """Problems with places that a listed constructor's arguments tell it to write to, not including nested targets.

    Libraries write any files there. So whatever the document is, these are folders below the current one, Hugging
    Face's caches, and what the user has named."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str) and is_written(key):
            rule, message, hint = _explain_written(item, access)
            if rule:
                yield Problem(f"{shorten(item)}{message}", (*path, key), rule, hint)
        elif not (isinstance(item, Mapping) and "_target_" in item):
            yield from check_written(item, (*path, key), access)


def _explain_written(text: str, access: Access) -> Refusal:
    if find_protocol(text) != "file" or "\0" in text or not access.may_fill(text):
        granted = GRANT_FOLDER + os.path.abspath(os.path.expanduser(text))
        hint = f"leave it out, use a folder below the current one, or run with --trust {quote_word(granted)}"
        return "outside-folder", " is outside the current folder, and the target would write there", hint
    rule, message, hint = ALLOWED if access.is_cache(text) else access.explain(text, write=True)
    return rule, f": {message}", hint


def split_pattern(pattern: str) -> tuple[str, list[str]]:
    """The folder above the first wildcard of a pattern, and the parts of the path below it."""
    above = MAGIC.split(pattern, maxsplit=1)[0].rpartition("/")[0]
    start = len(above) + 1 if above or pattern.startswith("/") else 0
    return above or ("/" if pattern.startswith("/") else "."), pattern[start:].split("/")


def _list_bases(value: Mapping[str, Any]) -> list[str]:
    """Folders to which paths in the arguments may be relative, including the current one ("")."""
    listed = value.get("_args_")
    firsts = [
        value.get("path"),
        value.get("pretrained_model_name_or_path"),
        *(listed[:1] if isinstance(listed, list) else ()),
    ]
    bases = ["", *(strip(first) for first in firsts if isinstance(first, str))]
    inside = value.get("data_dir")
    return bases + [os.path.join(base, strip(inside)) for base in bases] if isinstance(inside, str) else bases


def _names_kernel(path: str) -> bool:
    """Whether a path or glob pattern leads into a kernel folder."""
    for spelled in (path, os.path.normpath(path)):  # a link followed by ".." leads to different places
        parts = spelled.split("/")
        fixed = next((index for index, part in enumerate(parts) if MAGIC.search(part)), len(parts))
        above = list_real_paths("/".join(parts[:fixed]) or ("/" if path.startswith("/") else "."))[0]
        real = os.path.join(above, *parts[fixed:])
        first = real.lstrip("/").split("/")[0]
        if "{" in first or any(fnmatch.fnmatchcase(name, first) for name in _KERNEL):
            return not real.startswith("/dev/shm/")
    return False


def strip(text: str) -> str:
    """The path in a text; "" if it cannot be a path."""
    local = re.sub(r"(?i)^\s*(file|local):(//)?", "", text)
    return "" if "\0" in local or "://" in local else os.path.expanduser(local)
