"""Shortening untrusted values for messages, before they are formatted as a whole.

`repr` and `json.dumps` take time in proportion to their result, and a few kilobytes of YAML that repeat a shared list
can make that result practically endless.
"""

from __future__ import annotations

from typing import Any

from dsjob.contract.masking import mask

SHOWN = 60  # characters of a value in a message
_MAX_DEPTH, _MAX_ITEMS = 3, 8
_MASKED = 4096  # characters of a text in which values of environment variables are masked


def shorten(value: object, limit: int = SHOWN, *, as_json: bool = False) -> str:
    """A value of any kind for a message, in Python's or JSON's notation: at most `limit` characters."""
    return cut(_format(value, limit, _MAX_DEPTH, as_json), limit)


def cut(text: str, limit: int = SHOWN) -> str:
    """At most `limit` characters of a text; dots mark that the rest is cut off."""
    text = mask(text[: limit + _MASKED])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _format(value: Any, limit: int, depth: int, as_json: bool) -> str:
    if value is None or isinstance(value, bool):
        words = {None: "null", True: "true", False: "false"}
        return words[value] if as_json else str(value)
    if isinstance(value, int):
        return f"{int(value)}" if value.bit_length() <= 1024 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"{float(value)}"
    if isinstance(value, str):
        text = mask(value[: limit + _MASKED])
        return f'"{text}"' if as_json else repr(text)
    if isinstance(value, (bytes, bytearray)):
        return repr(bytes(value[: limit + 1]))
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return _format_items(value, limit, depth, as_json)
    return f"<{type(value).__name__}>"


def _format_items(value: Any, limit: int, depth: int, as_json: bool) -> str:
    first, last = ("{", "}") if isinstance(value, (dict, set, frozenset)) else ("(", ")")
    if isinstance(value, list) or (as_json and first == "("):
        first, last = "[", "]"
    if depth == 0 and value:
        return f"{first}...{last}"
    items: list[str] = []
    length = 0
    for item in value:
        if len(items) == _MAX_ITEMS or length > limit:
            items.append("...")
            break
        text = _format(item, limit, depth - 1, as_json)
        if isinstance(value, dict):
            text += f": {_format(value[item], limit, depth - 1, as_json)}"
        items.append(text)
        length += len(text)
    lone = "," if first == "(" and len(items) == 1 else ""  # a tuple of one item is written (x,)
    return f"{first}{', '.join(items)}{lone}{last}"
