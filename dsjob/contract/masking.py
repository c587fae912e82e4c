"""Masks values that documents read from the environment, however they are written.

`mask` and `mask_texts` are for texts that are written to files; `dsjob.contract.masked_output` masks output.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from dsjob.contract.output_filter import Mask

MIN_MASKED = 6  # characters: masking shorter values would garble unrelated output
_LINE = 76  # characters of base64 in a line, as the command base64 writes it
_spellings: set[str] = set()
_mask: Mask | None = None  # of texts that are complete
_watchers: list[Callable[[], None]] = []  # called when there are new spellings


def add_value(value: str) -> None:
    """Masks a value from now on."""
    global _mask
    found = set()
    for text in {value, *(line.strip() for line in value.splitlines())}:
        # Names of files and folders are no secrets, and dsjob's messages need them. A short number is not masked
        # either: it would be found in many other numbers.
        if len(text) >= MIN_MASKED and not (os.path.exists(text) or (len(text) < 8 and _is_number(text))):
            found |= {spelling for spelling in _list_spellings(text) if len(spelling) >= MIN_MASKED}
    if not found <= _spellings:
        _spellings.update(found)
        _mask = Mask(_spellings)
        for call in _watchers:
            call()


def list_spellings() -> frozenset[str]:
    """All texts that are masked."""
    return frozenset(_spellings)


def watch(call: Callable[[], None]) -> None:
    """Calls `call` whenever there is more to mask."""
    _watchers.append(call)


def unwatch(call: Callable[[], None]) -> None:
    """Ends `watch`."""
    _watchers.remove(call)


def mask(text: str) -> str:
    """`text` with *** for each value that was read from the environment."""
    return _mask.mask(text) if _mask is not None else text


def mask_texts(value: Any) -> Any:
    """A JSON value with its texts and keys masked; numbers stay."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {mask_texts(key): mask_texts(item) for key, item in value.items()}
    return [mask_texts(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _list_spellings(value: str) -> Iterator[str]:
    """The forms in which a value may occur in a text: as it is, escaped for Python, JSON or a URL, in base64 and in
    hexadecimal digits."""
    raw = value.encode(errors="surrogateescape")
    yield from (value, repr(value)[1:-1], ascii(value)[1:-1], repr(raw)[2:-1])
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    for quoted in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
        yield from (quoted, re.sub("%..", lambda found: found[0].lower(), quoted))
    yield "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    yield from (raw.hex(), raw.hex().upper())
    for before in range(3):  # bytes before it that share its first characters in base64, as in `user:password`
        whole = base64.b64encode(bytes(before) + raw).decode()
        kept = whole[(8 * before + 5) // 6 : 8 * (before + len(raw)) // 6]  # the characters that it alone decides
        yield from (kept, kept.replace("+", "-").replace("/", "_"))
        if not before and len(kept) > _LINE:
            yield "\n".join(kept[start : start + _LINE] for start in range(0, len(kept), _LINE))
