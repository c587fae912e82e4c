"""Overrides that are not written as `key=value`. They are reported here, before a parser takes them for files or
unknown flags."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from dsjob.contract.paths import Path
from dsjob.errors import UsageError
from dsjob.terminal import quote_word

_FLAG = re.compile(r"--?([A-Za-z]\w*(?:\.\w+)*)(?:[= ](.*))?", re.DOTALL)
_WORD = re.compile(r"([A-Za-z]\w*(?:\.\w+)+)[:=]?")

_FILES = (".json", ".jsonc", ".hjson", ".yaml", ".yml")
# Flags of commands that have the same name as a key of the document.
_FLAGS = {"best", "ema", "format", "offload", "schedule", "strict"}


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override and not the name of a file."""
    key, is_pair, _ = word.partition("=")
    return word[:1] in ("~", "+") or bool(is_pair and not re.search("://|::", key) and not os.path.exists(word))


def require_overrides(arguments: Sequence[str]) -> None:
    """Raises UsageError for `trainer.max_steps 300`, `--trainer.max_steps=300` and the like; the hint is the correct
    override.

    The parser of the command handles all other flags and words.
    """
    for number, argument in enumerate(arguments):
        flag, word = _FLAG.fullmatch(argument), _WORD.fullmatch(argument)
        # A word after a flag may be the flag's value.
        before = arguments[number - 1] if number else ""
        if word and (os.path.exists(argument) or argument.endswith(_FILES) or before.startswith("-")):
            continue
        found = flag or word
        path = _find_key(found[1]) if found else None
        if found is None or path is None:
            continue
        following = [text for text in arguments[number + 1 : number + 3] if text not in ("=", ":")][:1]
        given = flag[2] if flag and flag[2] is not None else "".join(text for text in following if _is_value(text))
        if word and argument.endswith("=") and not given:
            continue  # an override with an empty value
        meant = quote_word(f"{'.'.join(map(str, path))}={given}") if given else f"{'.'.join(map(str, path))}=VALUE"
        raise UsageError(f"{argument!r} is not an override", hint=f"write key=value: {meant}")


def _is_value(text: str) -> bool:
    return not text.startswith(("--", "+", "~")) and "=" not in text and not os.path.exists(text)


def _find_key(dotted: str) -> Path | None:
    """The path of the key that a word names: by its full path, or by its last part if only one key has that name."""
    from dsjob.contract import schema as contract

    schema, parts = contract.job_schema(), dotted.split(".")
    if len(parts) > 1:
        return tuple(parts) if parts[0] in schema["properties"] else None
    homes = contract.list_homes(schema).get(dotted, []) if dotted not in _FLAGS else []
    return (*homes[0], dotted) if len(homes) == 1 else None
