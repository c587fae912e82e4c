"""What the arguments in a document ask of a hub: code that would run, pickles, names that are not pinned to a commit.

Owns the rules about arguments; which callables may be named at all is for `trust`. Nothing is looked up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.errors import Problem
from dsjob.paths import Path

_LOADERS = {"from_pretrained": "pretrained_model_name_or_path", "load_dataset": "path"}
_FORMATS = ("json", "csv", "parquet", "text", "arrow", "imagefolder", "audiofolder", "videofolder", "xml", "lance")
_UNPICKLING = ("pandas", "webdataset")  # formats of `datasets` that are read with pickle


def check_arguments(value: Mapping[str, Any], path: Path, *, remote_code: bool, unpinned: bool) -> Iterator[Problem]:
    """What the arguments in one object of a document ask for beyond calling its target.

    Code from a hub and weights in pickles need --trust-remote-code; names on a hub that are not pinned to a commit,
    whose content anybody's push may change, need --unpinned. Local folders need neither.
    """
    if not remote_code:
        for key, what in _find_remote_code(value):
            yield Problem(what, (*path, key), "remote-code", "run with --trust-remote-code, or leave it out")
    if unpinned or re.fullmatch(r"[0-9a-f]{40}", str(value.get("revision"))):
        return
    for place, name in _find_hub_names(value):
        told = f"{name!r} is a name on a hub, or a folder that is not there" if name else "is given by no plain name"
        advice = "add revision: <the 40 hex digits of a commit>, name a local folder, or run with --unpinned"
        yield Problem(told, (*path, *place), "unpinned", advice)


def _find_remote_code(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("trust_remote_code", "use_kernels", "allow_pickle"):
        if value.get(key) not in (None, False):
            yield key, "lets somebody else's code run"
    for key in ("weights_only", "use_safetensors"):
        if value.get(key) not in (None, True):
            yield key, "lets weights be unpickled, which may run code"
    for key in ("attn_implementation", "_attn_implementation"):
        if "/" in str(value.get(key)):
            yield key, "names a kernel on a hub, whose code would run"
    loader = str(value.get("_target_")).rpartition(".")[2]
    if loader == "load_dataset" and _first(value, "path")[1] in _UNPICKLING:
        yield _first(value, "path")[0][0], "names a format that is read with pickle, which may run code"
    if loader in _LOADERS and len(_listed(value)) > 1:
        yield "_args_", "hides the names of arguments: give all but the first by name"


def _find_hub_names(value: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    target = str(value.get("_target_"))
    loader = target.rpartition(".")[2]
    keys = {"pretrained", "pretrained_model_name_or_path"}
    if target.startswith("dsjob.recipes."):
        keys.add("tokenizer")
    if value.get("use_pretrained_backbone"):
        keys.add("backbone")
    if loader in _LOADERS:
        keys.discard(_LOADERS[loader])
        place, name = _first(value, _LOADERS[loader])
        if not isinstance(name, str):
            yield place, ""
        elif not (_is_local(name) or (loader == "load_dataset" and name in (*_FORMATS, *_UNPICKLING))):
            yield place, name
    for key in sorted(keys):
        name = value.get(key)
        if isinstance(name, str) and not _is_local(name):
            yield (key,), name


def _listed(value: Mapping[str, Any]) -> list[Any]:
    given = value.get("_args_")
    return given if isinstance(given, list) else []


def _first(value: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], Any]:
    """The first argument of a loader, given by name or by position, and its place; the place is () without one."""
    if key in value:
        return (key,), value[key]
    listed = _listed(value)
    return (("_args_",), listed[0]) if listed else ((), None)


def _is_local(name: str) -> bool:
    return os.path.isdir(name) or name.startswith(("/", "./", "../"))
