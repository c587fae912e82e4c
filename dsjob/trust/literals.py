"""Arguments of readers, the listed constructors that read files or a hub: they must be literals at every depth, and may
not be made by another target.

A text that a target reads from a file is not in the document, so the rules for URLs and hubs have not checked it, and
it could be sent away in a request. The exception is a configuration of transformers, which consists of literals itself.
Readers may not be bound either (`_partial_`), because the loop would call them with samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.contract.paths import Path
from dsjob.contract.shown import shorten
from dsjob.errors import Problem
from dsjob.terminal import quote_word
from dsjob.trust.places import ROWS, list_arguments

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
    """Problems with options of file systems and clients in the arguments of a listed constructor, not including nested
    targets."""
    target = str(value["_target_"])
    for place, item in list_arguments(value):
        inside = any(part in _OPTIONS for part in place[:-1])
        if place[-1] in _OPTIONS and item is not None and not inside and target not in ROWS:
            message = f"{place[-1]} can change where requests go and what they contain"
            advice = f"leave it out, or run with --trust {quote_word(target)}"
            yield Problem(message, (*path, *place), "request-option", advice)
