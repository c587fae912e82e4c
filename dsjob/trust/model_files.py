"""Reads the files of a model that transformers is about to load, so that `hub` can apply the same rules to them as to
the arguments in a document.

A model's `config.json` may name kernels on a hub, and an adapter's file may name its base model. A local folder is read
when a document is checked; files on a hub are read when the model is about to be loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dsjob.files import is_plain

_FILE = re.compile(r"config(\.[^/]+)?\.json|adapter_config\.json")  # transformers may also choose a config.VERSION.json
_VERSION = re.compile(r"config\.[^/]+\.json")
_CACHED = re.compile(r"/(?P<repository>models--[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/")
# Arguments of a loader that determine where the model is.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_INDEX = re.compile(r".+\.index(\.[^/]+)?\.json")
_SLASH = re.compile(rb':\s*"[^"]*[/\\]')  # in a value; JSON may write it as \u002f
_MAX_INDEX = 64 << 20
_MAX_SIZE = 4 << 20  # bytes; the largest published ones have some 100 kB, mostly names of classes
_ENDLESS = "is a pipe or a device, so reading it may never end"
_FOLLOWED = 8  # models in a chain of models that name each other


class Found(NamedTuple):
    """One mapping in a model's file: the file's path, the mapping's place in it, and its value."""

    file: str
    place: str
    value: Mapping[str, Any]
    unread: str = ""  # why the rest of the file was not read, in which case the file cannot be considered safe


def read_folder(folder: str) -> Iterator[Found]:
    """All mappings in the files of a model's folder, and of other folders that it names and that are loaded with it.

    `folder`: the folder, or a config file, which transformers accepts as well.
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
    """All mappings in the files that transformers reads for a model, local or on a hub, and for models that it names.

    `options`: the arguments with which it is loaded. Files that are not in the cache are downloaded, as loading would.
    """
    given = {key: options[key] for key in _WHERE if options.get(key) is not None}

    def read(model: str) -> Iterator[Found]:
        return _fetch_one(model, given)

    return _follow(name, read, lambda found: [base for _, base in list_named(found.value, found.file)])


def _follow(first: str, read: Callable[[str], Iterator[Found]], name: Callable[[Found], list[str]]) -> Iterator[Found]:
    """What `read` finds in a model and in all models that it names (see `name`), each once, with a limit."""
    waiting = [first]
    seen: set[str] = set()
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        if len(seen) == _FOLLOWED:
            yield Found(first, "", {}, f"names more than {_FOLLOWED} other models, too many to check")
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
    for file in files:  # the loop appends to this list
        path = cached_file(model, file, **given, **quiet)
        for found in read_file(path) if path is not None else ():
            yield found
            listed = found.value.get("configuration_files")
            versions = dict.fromkeys(map(str, listed)) if isinstance(listed, list) else {}
            files += [version for version in versions if _VERSION.fullmatch(version) and version not in files]


def find_strays(folder: str) -> Iterator[str]:
    """Files that the indexes of a model's weights name outside of the folder, where a loader would read them."""
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not _INDEX.fullmatch(name) or not os.path.isfile(path := os.path.join(folder, name)):
            continue
        with open(path, "rb") as file:
            text = file.read(_MAX_INDEX)
        if not _SLASH.search(text):  # nearly all: the names of files beside the index
            continue
        try:
            files = json.loads(text)["weight_map"].values()
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            files = [".."]  # it is damaged, or too large to check
        inside = os.path.join(os.path.abspath(folder), "")
        strays = (str(one) for one in files if not os.path.abspath(os.path.join(folder, str(one))).startswith(inside))
        yield from (f"{path} names {stray}" for stray in dict.fromkeys(strays))


def find_commit(file: str) -> tuple[str, str]:
    """The repository and commit of a file in the hub client's cache; empty texts for any other file."""
    found = _CACHED.search(file.replace(os.sep, "/"))
    return (found["repository"], found["commit"]) if found else ("", "")


def list_named(value: Mapping[str, Any], file: str) -> list[tuple[str, str]]:
    """Other models that are loaded together with the one of `file`: the keys, and the names on a hub or of folders."""
    alone = not os.path.exists(os.path.join(os.path.dirname(file), "config.json"))  # an adapter without its model
    keys = ["base_model_name_or_path"] if alone else []
    keys += ["backbone"] if value.get("use_pretrained_backbone") else []
    return [(key, name) for key in keys if isinstance(name := value.get(key), str)]


def read_file(path: str) -> Iterator[Found]:
    """All mappings in a model's file. If the file cannot be read, transformers will report it."""
    if _is_endless(path):
        yield Found(path, "", {}, _ENDLESS)
        return
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_SIZE + 1)
        if len(text) > _MAX_SIZE:
            yield Found(path, "", {}, "is too large to check")
            return
        value = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return
    yield from walk(path, value)


def _is_endless(path: str) -> bool:
    return not is_plain(path)


def walk(file: str, value: Any) -> Iterator[Found]:
    """All mappings in the contents of a model's file, at any depth."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            yield Found(file, place, value)
            waiting += [(f"{place}.{key}" if place else str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
