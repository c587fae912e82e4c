"""The places that the user names on the command line. A document may use them, whatever it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dsjob.contract.access import fill_pattern, list_places
from dsjob.contract.locations import is_written
from dsjob.contract.paths import get_at
from dsjob.document.origins import Composed
from dsjob.trust.grant import Trust

_SERVICES = "monitor"  # its keys are named as such: `monitor.wandb`
_NO_PLACES = ("/", "~", ".", "..")  # as arguments, these may be something else


def name_places(trust: Trust, composed: Composed) -> Trust:
    """The trust with the places that overrides name, to be read or to be written."""
    if not composed.named:
        return trust
    marks = {path: mark for path, _, mark in list_places(composed.document)}
    reads, writes = list(trust.reads), list(trust.writes)
    for path in sorted(composed.named, key=str):
        value = get_at(composed.document, path)
        if path[0] == _SERVICES:
            writes += [".".join(map(str, path[:2])), *_list_texts(value)]
        elif path in marks and isinstance(value, str):
            (reads if marks[path] == "read" else writes).append(locate(fill_pattern(value, composed.document)))
        else:
            found = [locate(text) for text in _list_texts(value) if _leads_somewhere(text)]
            (writes if is_written(path[-1]) else reads).extend(found)
    return replace(trust, reads=tuple(dict.fromkeys(reads)), writes=tuple(dict.fromkeys(writes)))


def name_place(trust: Trust, place: str) -> Trust:
    """The trust with a place that the user names to be read."""
    return replace(trust, reads=(*trust.reads, locate(place)))


def locate(place: str) -> str:
    """A place as the trust has it: a URL, or an absolute path."""
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def _leads_somewhere(text: str) -> bool:
    return "://" in text or (text not in _NO_PLACES and os.path.lexists(os.path.expanduser(text)))


def _list_texts(value: Any) -> Iterator[str]:
    """A text, or the texts in a list. An override of a mapping names each value in it by its own path."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            yield from _list_texts(item)
