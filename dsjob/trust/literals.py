"""What listed constructors that read files or a hub may be given: literals, at every depth, and nothing that another
target has made.

A text that a target has read from a file is no text of the document: neither the rules for URLs nor those for hubs
would have seen it, and it could be sent away in a request. The exception is a configuration of transformers, which is
made of literals itself. Readers are not bound either (`_partial_`): the loop would call them with samples.
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

_READERS = re.compile(
    r"datasets\.(load_\w+|Dataset\.from_\w+)|transformers\.(?!\w*DataCollator|default_data_collator|get_\w+|Adafactor)\w.*"
)
LOADERS = ("from_pretrained", "from_config", "load_dataset", "load_from_disk")  # by whatever name they are reached
_CONFIG = re.compile(r"transformers\.[A-Z]\w*Config(\.from_pretrained)?")
_MODEL = re.compile(r"transformers\.[A-Z]\w*(Config|Model|For[A-Z]\w*)(\.from_pretrained|\.from_config)?")
_CONFIG_KEY = re.compile(r"(\w+_)?config")
# Options by which fsspec and the client of a hub send more than a request, or send it elsewhere.
_OPTIONS = (
    "storage_options", "download_config", "proxies", "fs", "headers", "cookies", "endpoint_url", "client_kwargs",
    "trust_env",
)  # fmt: skip
_KERNEL = ("proc", "dev", "sys")  # folders in which files are the state of processes and devices
_FOLDERS = ("path", "data_dir", "data_files", "dataset_path", "_args_")  # arguments that are no place for "/"
_ROWS = ("datasets.Dataset.from_dict", "datasets.Dataset.from_list")  # of which the arguments are the data


def is_reader(target: str, found: Any = None) -> bool:
    """Whether a listed constructor reads files or a hub. `found`: the callable, which may have another name."""
    home = f"{getattr(found, '__module__', '')}".split(".")[0]
    names = (target, f"{home}.{getattr(found, '__qualname__', '')}")
    return target.rpartition(".")[2] in LOADERS or any(_READERS.fullmatch(name) for name in names)


def check_literals(value: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Arguments of a reader that are no literals. `value`: the target with its arguments; `path`: its place."""
    target = str(value["_target_"])
    # A name of a model comes first, and has to be there (`hub`): a sample cannot become one.
    if value.get("_partial_") not in (None, False) and not target.endswith((".from_pretrained", ".from_config")):
        told = f"{target} may not be bound: it would read what it is called with"
        yield Problem(told, (*path, "_partial_"), "bound-reader", _hint(target))
    for place, nested in _find_targets({key: item for key, item in value.items() if key != "_target_"}):
        if not _is_configuration(target, place, nested):
            told = f"{target} takes literals only, not what {shorten(nested)} makes"
            yield Problem(told, (*path, *place), "nested-target", _hint(target))


def _hint(target: str) -> str:
    return f"call both in a function of your own module and name that, or run with --trust {target}"


def _find_targets(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Mapping) and "_target_" in value:
        yield path, str(value["_target_"])
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _find_targets(item, (*path, key))


def _is_configuration(target: str, place: Path, nested: str) -> bool:
    """Whether a nested target makes a part of a model of transformers, as their constructors take them."""
    if target.startswith("datasets."):
        return False
    if len(place) == 1 and not target.endswith((".from_pretrained", ".from_config")):
        return bool(_MODEL.fullmatch(nested))
    by_name = len(place) == 1 and bool(_CONFIG_KEY.fullmatch(str(place[0])))
    by_position = len(place) == 2 and place[0] == "_args_"
    return (by_name or by_position) and bool(_CONFIG.fullmatch(nested))


def check_options(value: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Options of file systems and clients, and files of the kernel, in the arguments of a listed constructor; nested
    targets are not entered."""
    target = str(value["_target_"])
    if target in _ROWS:
        return
    bases = _list_bases(value)
    for place, item in _list_arguments(value):
        key = place[-1]
        if key in _OPTIONS and item is not None:
            told = f"{key} may change where a request goes and what it carries"
            yield Problem(told, (*path, *place), "request-option", f"leave it out, or run with --trust {target}")
        elif isinstance(item, str) and key != "_target_":
            paths = [os.path.join(base, local) for base in bases] if (local := _strip(item)) else []
            if any(_names_kernel(one) or (place[0] in _FOLDERS and _resolve(one) == "/") for one in paths):
                told = f"{shorten(item)}: may name files of /proc, /dev or /sys"
                yield Problem(told, (*path, *place), "kernel-file", "name a file or folder of data")


def _list_arguments(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in the arguments, with its place; nothing of what is refused as a whole, or of nested targets."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        if key not in _OPTIONS and not (isinstance(item, Mapping) and "_target_" in item):
            yield from _list_arguments(item, (*path, key))


def _list_bases(value: Mapping[str, Any]) -> list[str]:
    """Folders that paths in the arguments may be relative to, the current one ("") among them."""
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
    """Whether a path, or a pattern of paths, leads into a folder of the kernel."""
    for spelled in (path, os.path.normpath(path)):  # a link followed by ".." leads to different places
        parts = spelled.split("/")
        fixed = next((index for index, part in enumerate(parts) if re.search(r"[*?\[{]", part)), len(parts))
        real = os.path.join(_resolve("/".join(parts[:fixed]) or ("/" if path.startswith("/") else ".")), *parts[fixed:])
        first = real.lstrip("/").split("/")[0]
        if "{" in first or any(fnmatch.fnmatchcase(name, first) for name in _KERNEL):
            return not real.startswith("/dev/shm/")
    return False


def _strip(text: str) -> str:
    """The path in a text; "" where it could be none."""
    local = re.sub(r"(?i)^\s*(file|local):(//)?", "", text)
    return "" if "\0" in local or "://" in local else os.path.expanduser(local)


def _resolve(path: str) -> str:
    try:
        return "/" + os.path.realpath(path).lstrip("/")
    except (OSError, ValueError):  # no name that a file could have
        return path
