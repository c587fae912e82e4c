"""What the files of a model ask for when transformers loads it: the same policy as for the arguments in a document.

A model's `config.json` may name kernels on a hub, and an adapter's file the model that it belongs to. A folder on this
machine is read when a document is checked, what comes from a hub when it is about to be loaded. Owns which files there
are and how they are read; what may stand in them is for `hub`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dsjob.files import is_plain

_FILE = re.compile(r"config(\.[^/]+)?\.json|adapter_config\.json")  # transformers picks a config.VERSION.json, too
_VERSION = re.compile(r"config\.[^/]+\.json")
_CACHED = re.compile(r"/(?P<repository>models--[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/")
# What says where a model is, among the arguments that it is loaded with.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_MAX_SIZE = 4 << 20  # bytes; the longest of those published have some 100 kB, mostly names of classes
_ENDLESS = "is a pipe or a device, of which a read may never end"
_FOLLOWED = 8  # models that name one another


class Found(NamedTuple):
    """One mapping of a model's file, by the file's path, and its place in it."""

    file: str
    place: str
    value: Mapping[str, Any]
    unread: str = ""  # why there is more that was not read: what was found then proves nothing


def read_folder(folder: str) -> Iterator[Found]:
    """Every mapping in the files of a model's folder, and in those of folders that it names to be loaded with it.

    `folder`: or a config file itself, which transformers takes as well.
    """

    def read(model: str) -> Iterator[Found]:
        place = os.path.realpath(model)
        names = sorted(filter(_FILE.fullmatch, os.listdir(place))) if os.path.isdir(place) else []
        for file in [place] if os.path.isfile(place) else [os.path.join(place, name) for name in names]:
            yield from read_file(file)
        for other in os.listdir(place) if os.path.isdir(place) else []:
            if other not in names and _is_endless(file := os.path.join(place, other)):
                yield Found(file, "", {}, _ENDLESS)

    def name(found: Found) -> list[str]:
        return [os.path.realpath(at) for _, at in list_named(found.value, found.file) if os.path.isdir(at)]

    return _follow(folder, read, name)


def fetch(name: str, options: Mapping[str, Any]) -> Iterator[Found]:
    """Every mapping in the files that transformers reads of a model, here or on a hub, and of those that it names.

    `options`: the arguments that it is loaded with. What is not in the cache is downloaded, as loading it would.
    """
    given = {key: options[key] for key in _WHERE if options.get(key) is not None}

    def read(model: str) -> Iterator[Found]:
        return _fetch_one(model, given)

    return _follow(name, read, lambda found: [base for _, base in list_named(found.value, found.file)])


def _follow(first: str, read: Callable[[str], Iterator[Found]], name: Callable[[Found], list[str]]) -> Iterator[Found]:
    """What `read` finds in a model, and in those that `name` finds it to name, each once and not too many of them."""
    waiting = [first]
    seen: set[str] = set()
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        if len(seen) == _FOLLOWED:
            yield Found(first, "", {}, f"names too many models to be checked: more than {_FOLLOWED}")
            return
        seen.add(model)
        for found in read(model):
            yield found
            waiting += name(found)


def _fetch_one(model: str, given: Mapping[str, Any]) -> Iterator[Found]:
    from transformers.utils.hub import cached_file

    alone = [path for path in (model, os.path.join(str(given.get("subfolder", "")), model)) if os.path.isfile(path)]
    if alone:
        yield from (found for path in alone for found in read_file(path))
        return
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    files = ["adapter_config.json", "config.json"]
    for file in files:  # which grows
        path = cached_file(model, file, **given, **quiet)
        for found in read_file(path) if path is not None else ():
            yield found
            listed = found.value.get("configuration_files")
            versions = dict.fromkeys(map(str, listed)) if isinstance(listed, list) else {}
            files += [version for version in versions if _VERSION.fullmatch(version) and version not in files]


def find_commit(file: str) -> tuple[str, str]:
    """The repository and commit of a file in the cache of the hub's client; texts without characters of another's."""
    found = _CACHED.search(file.replace(os.sep, "/"))
    return (found["repository"], found["commit"]) if found else ("", "")


def list_named(value: Mapping[str, Any], file: str) -> list[tuple[str, str]]:
    """Other models that are loaded with the one of `file`: their keys and names, on a hub or of folders."""
    alone = not os.path.exists(os.path.join(os.path.dirname(file), "config.json"))  # an adapter without its model
    keys = ["base_model_name_or_path"] if alone else []
    keys += ["backbone"] if value.get("use_pretrained_backbone") else []
    return [(key, name) for key in keys if isinstance(name := value.get(key), str)]


def read_file(path: str) -> Iterator[Found]:
    """Every mapping in a model's file; one that cannot be read is left to transformers to complain about."""
    if _is_endless(path):
        yield Found(path, "", {}, _ENDLESS)
        return
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_SIZE + 1)
        if len(text) > _MAX_SIZE:
            yield Found(path, "", {}, "is too large to be checked")
            return
        value = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return
    yield from walk(path, value)


def _is_endless(path: str) -> bool:
    return not is_plain(path)


def walk(file: str, value: Any) -> Iterator[Found]:
    """Every mapping in the values of a model's file, at any depth."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            yield Found(file, place, value)
            waiting += [(f"{place}.{key}" if place else str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
