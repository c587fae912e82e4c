"""Arguments of readers, the listed constructors that read files or a hub: they must be literals at every depth, and may
not be made by another target.

A text that a target reads from a file is not in the document, so the rules for URLs and hubs have not checked it, and
it could be sent away in a request. The exception is a configuration of transformers, which consists of literals itself.
Readers may not be bound either (`_partial_`), because the loop would call them with samples.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.contract.paths import Path
from dsjob.contract.shown import shorten
from dsjob.errors import Problem
from dsjob.terminal import quote_word

_READERS = re.compile(
    r"dsjob\.text\.Text|datasets\.(load_\w+|Dataset\.from_\w+)|transformers\.(?!\w*DataCollator|default_data_collator|get_\w+|Adafactor)\w.*"
)
LOADERS = ("from_pretrained", "from_config", "load_dataset", "load_from_disk")  # under any module's name
_CONFIG = re.compile(r"transformers\.[A-Z]\w*Config(\.from_pretrained)?")
_MODEL = re.compile(r"transformers\.[A-Z]\w*(Config|Model|For[A-Z]\w*)(\.from_pretrained|\.from_config)?")
_CONFIG_KEY = re.compile(r"(\w+_)?config")
# Options that make fsspec or a hub's client send more than a plain request, or send it elsewhere.
_OPTIONS = (
    "storage_options", "download_config", "proxies", "fs", "headers", "cookies", "endpoint_url", "client_kwargs",
    "trust_env",
)  # fmt: skip
_KERNEL = ("proc", "dev", "sys")  # folders whose files expose the state of processes and devices
_FOLDERS = ("path", "data_dir", "data_files", "dataset_path", "source", "_args_")  # arguments that may not be "/"
_ROWS = ("datasets.Dataset.from_dict", "datasets.Dataset.from_list")  # their arguments are data, not paths


def is_reader(target: str, found: Any = None) -> bool:
    """Whether a target is a reader. `found`: the callable, which may be a reader under another name."""
    home = f"{getattr(found, '__module__', '')}".split(".")[0]
    names = (target, f"{home}.{getattr(found, '__qualname__', '')}")
    return target.rpartition(".")[2] in LOADERS or any(_READERS.fullmatch(name) for name in names)


def check_literals(value: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Problems with arguments of a reader that are not literals. `value`: the target with its arguments; `path`: its
    place."""
    target = str(value["_target_"])
    # from_pretrained may be bound: its first argument, the model's name, must be in the document (see `hub`), so the
    # loop cannot pass a sample as the name.
    if value.get("_partial_") not in (None, False) and not target.endswith((".from_pretrained", ".from_config")):
        message = f"{target} may not be bound: it would read files that samples name"
        yield Problem(message, (*path, "_partial_"), "bound-reader", _hint(target))
    for place, nested in _find_targets({key: item for key, item in value.items() if key != "_target_"}):
        if not _is_configuration(target, place, nested):
            message = f"{target} only accepts literal arguments, not the result of {shorten(nested)}"
            yield Problem(message, (*path, *place), "nested-target", _hint(target))


def _hint(target: str) -> str:
    return (
        f"write a function in your own module that calls both and use it here, or run with --trust {quote_word(target)}"
    )


def _find_targets(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Mapping) and "_target_" in value:
        yield path, str(value["_target_"])
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _find_targets(item, (*path, key))


def _is_configuration(target: str, place: Path, nested: str) -> bool:
    """Whether a nested target is a configuration, or a part of a transformers model, in a place that accepts it."""
    if target.startswith("datasets."):
        return False
    if len(place) == 1 and not target.endswith((".from_pretrained", ".from_config")):
        return bool(_MODEL.fullmatch(nested))
    by_name = len(place) == 1 and bool(_CONFIG_KEY.fullmatch(str(place[0])))
    by_position = len(place) == 2 and place[0] == "_args_"
    return (by_name or by_position) and bool(_CONFIG.fullmatch(nested))


def check_options(value: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Problems with options of file systems and clients, and with kernel files, in the arguments of a listed
    constructor, not including nested targets."""
    target = str(value["_target_"])
    if target in _ROWS:
        return
    bases = _list_bases(value)
    for place, item in _list_arguments(value):
        key = place[-1]
        if key in _OPTIONS and item is not None:
            message = f"{key} can change where requests go and what they contain"
            yield Problem(
                message, (*path, *place), "request-option", f"leave it out, or run with --trust {quote_word(target)}"
            )
        elif isinstance(item, str) and key != "_target_":
            paths = [os.path.join(base, local) for base in bases] if (local := _strip(item)) else []
            if any(_names_kernel(one) or (place[0] in _FOLDERS and _resolve(one) == "/") for one in paths):
                message = f"{shorten(item)} may name files in /proc, /dev or /sys"
                yield Problem(message, (*path, *place), "kernel-file", "use a file or folder with data")


def _list_arguments(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All values in the arguments with their places, except inside refused options and nested targets."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        if key not in _OPTIONS and not (isinstance(item, Mapping) and "_target_" in item):
            yield from _list_arguments(item, (*path, key))


def _list_bases(value: Mapping[str, Any]) -> list[str]:
    """Folders to which paths in the arguments may be relative, including the current one ("")."""
    listed = value.get("_args_")
    firsts = [
        value.get("path"),
        value.get("pretrained_model_name_or_path"),
        *(listed[:1] if isinstance(listed, list) else ()),
    ]
    bases = ["", *(_strip(first) for first in firsts if isinstance(first, str))]
    inside = value.get("data_dir")
    return bases + [os.path.join(base, _strip(inside)) for base in bases] if isinstance(inside, str) else bases


def _names_kernel(path: str) -> bool:
    """Whether a path or glob pattern leads into a kernel folder."""
    for spelled in (path, os.path.normpath(path)):  # a link followed by ".." leads to different places
        parts = spelled.split("/")
        fixed = next((index for index, part in enumerate(parts) if re.search(r"[*?\[{]", part)), len(parts))
        real = os.path.join(_resolve("/".join(parts[:fixed]) or ("/" if path.startswith("/") else ".")), *parts[fixed:])
        first = real.lstrip("/").split("/")[0]
        if "{" in first or any(fnmatch.fnmatchcase(name, first) for name in _KERNEL):
            return not real.startswith("/dev/shm/")
    return False


def _strip(text: str) -> str:
    """The path in a text; "" if it cannot be a path."""
    local = re.sub(r"(?i)^\s*(file|local):(//)?", "", text)
    return "" if "\0" in local or "://" in local else os.path.expanduser(local)


def _resolve(path: str) -> str:
    try:
        return "/" + os.path.realpath(path).lstrip("/")
    except (OSError, ValueError):  # not a valid file name
        return path
