"""Overrides before Hydra reads them, and what is wrong with one that it cannot read.

Their size is limited: Hydra takes quadratic time for lists, and looks for a file named after each key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dsjob.contract import schema as contract
from dsjob.contract.bounds import MAX_DEPTH
from dsjob.contract.check import explain_unknown
from dsjob.contract.hints import find_similar
from dsjob.contract.paths import Path
from dsjob.contract.secrets import hide_value
from dsjob.errors import Problem, UsageError

MAX_KEY: Final = 250  # bytes; most file systems limit names to 255
MAX_ITEMS: Final = 2_000  # in the lists, dicts and choices of all overrides together
MAX_RUNS: Final = 10_000  # of a sweep over all combinations
GROUPS: dict[str, Path] = {  # the path that each config group sets
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
    "precision": ("bf16", "enabled"),
    "zero": ("zero_optimization", "stage"),
}
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_KEY_CHARACTER = re.compile(r"[A-Za-z0-9_./@$-]")
_VALUE_CHARACTER = re.compile(r"[A-Za-z0-9_/\\+.$%*@?|:,\s\[\]{}()-]")  # of a text without quotes
_CLOSING = {"[": "]", "{": "}", "(": ")"}


def require_small(overrides: Sequence[str]) -> None:
    """Raises UsageError for overrides on which Hydra would take minutes or fail."""
    items = 0
    for override in overrides:
        key, _, value = override.partition("=")
        if len(key.encode()) > MAX_KEY or key.count(".") >= MAX_DEPTH:
            raise UsageError(
                f"the key of an override has {len(key.encode()):,} bytes and {key.count('.') + 1:,} parts;"
                f" the limits are {MAX_KEY} and {MAX_DEPTH}: {key[:40]}...",
                hint="write deep structures in the job file",
            )
        commas = _QUOTED.sub("", value).count(",")
        items += commas + 1 if commas else 0
    if items > MAX_ITEMS:
        raise UsageError(
            f"the overrides hold {items:,} items of lists; the limit is {MAX_ITEMS:,}",
            hint="write long lists in the job file",
        )


def require_few_runs(count: float) -> None:
    """Raises UsageError if a sweep has more than `MAX_RUNS` runs."""
    if count > MAX_RUNS:
        raise UsageError(
            f"the sweep has {count:,.0f} runs; the limit is {MAX_RUNS:,}",
            hint="give a range larger steps, such as range(1,100,10), or sample it with hydra/sweeper=optuna",
        )


def require_keys(overrides: Sequence[str]) -> None:
    """Raises UsageError for an override without a key, which Hydra takes for the choice of an unnamed config."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if not key.split("@")[0]:
            raise explain_unreadable(override)


def explain_unreadable(override: str) -> UsageError:
    """The error for an override that Hydra cannot read: what is wrong, and at which character."""
    why, hint = _find_fault(override)
    return UsageError(f"cannot read the override {hide_value(override)!r}: {why}", hint=hint)


def _find_fault(override: str) -> tuple[str, str]:
    """What is wrong with an override, and what to do. Quotes nothing of its value, which may be a secret."""
    key, sign, value = override.partition("=")
    bare = key.lstrip("+~")
    if not bare.split("@")[0]:
        return "it names no key", "write key=value, for example trainer.max_steps=10"
    if not sign and not key.startswith("~"):
        name = re.split(r"[:\s]", bare)[0]
        return "there is no = in it", f"write {name}=VALUE"
    if ".." in bare or bare.strip(".") != bare:
        return "a part of the key is empty", "write one dot between two names: trainer.max_steps=10"
    if "[" in bare or "]" in bare:
        return "a key has no brackets", f"write the number of an item like a name: {bare.split('[')[0]}.0=value"
    if bare.startswith("-"):
        return "a key cannot begin with -", "flags of dsjob are listed by dsjob --help"
    for at, character in enumerate(bare, start=len(key) - len(bare) + 1):
        if not _KEY_CHARACTER.fullmatch(character):
            return f"{_name(character)} (character {at}) cannot be part of a key", "write key=value, without spaces"
    return _find_fault_in(value, len(key) + 1) or (
        "its value is neither a number, a text nor a list",
        f"put a text in quotes: '{bare}=\"a text\"'",
    )


def _find_fault_in(value: str, start: int) -> tuple[str, str] | None:
    """The fault of a value that starts at character `start` (from 0): brackets, quotes, or a character to quote."""
    plain = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), value)  # what is in quotes may be anything
    opened: list[tuple[str, int]] = []
    before = ""
    for at, character in enumerate(plain, start=start + 1):
        if character in "'\"":
            return f"the quote at character {at} is not closed", "close it; the shell removes quotes: 'key=\"a text\"'"
        if not _VALUE_CHARACTER.fullmatch(character):
            return f"{_name(character)} (character {at}) is special", "put the value in quotes: 'key=\"a text\"'"
        if character in _CLOSING:
            opened.append((character, at))
        elif character in _CLOSING.values():
            if not opened or _CLOSING[opened.pop()[0]] != character:
                return f"the bracket {character} at character {at} closes nothing", _HINT_BRACKETS
        elif character == "," and before in ("", ",", "[", "{", "("):
            return f"nothing comes before the comma at character {at}", "leave out the comma"
        before = character if not character.isspace() else before
    if opened:
        bracket, at = opened[-1]
        hint = _HINT_BRACKETS if bracket == "[" else "close it, or put a text in quotes: 'key=\"a text\"'"
        return f"the bracket {bracket} at character {at} is not closed", hint
    return ("nothing comes after the last comma", "leave out the comma") if before == "," else None


def _name(character: str) -> str:
    return "a space" if character == " " else repr(character)


_HINT_BRACKETS = "write a list without spaces, or the whole override in quotes: 'optimizer.params.betas=[0.9, 0.99]'"


def explain_no_key(key: str, wrong: str = "", siblings: Sequence[str] = ()) -> Problem:
    """The problem of an override `key=...` if the document has no such key. `wrong`: the part of `key` that is missing
    in the document; `siblings`: the keys that are there instead."""
    schema: contract.Schema = contract.job_schema()
    parts = key.split(".")
    for index, part in enumerate(parts):
        below = contract.child(schema, part)
        if below is None or not below.get("properties"):
            known = list(schema.get("properties", {}))
            if below is None and not contract.is_target(schema):
                if not index and part == "recipe":
                    hint = "a recipe is chosen with a plus: +recipe=NAME"
                    return Problem("is not a key of a job", (part,), "unknown-key", hint, "command line")
                return replace(explain_unknown(tuple(parts[:index]), part, known), source="command line")
            if below is not None and index + 1 < len(parts) and _is_value(below):
                message = f"{'.'.join(parts[: index + 1])} is a value, not a section"
                return Problem(message, tuple(parts), "not-there", "", "command line")
            break
        schema = below
    own = list(schema.get("properties", {}))
    takes_any = contract.is_target(schema) and "type" not in own  # an optimizer's arguments are mostly in params
    return _explain_absent(parts, wrong, siblings, None if takes_any else own)


def _explain_absent(parts: list[str], wrong: str, siblings: Sequence[str], known: list[str] | None) -> Problem:
    """The problem of an override of a key that a section could have, but does not.

    `known`: the section's own keys; None if any key may be an argument of what the section calls.
    """
    if wrong and wrong not in parts:  # a key inside the value, which is merged into the section
        parts = [*parts, wrong]
    key, meant = ".".join(parts), find_similar(wrong, siblings)
    if meant and wrong in parts[:-1]:  # a misspelt section: the argument itself need not exist yet
        at = parts.index(wrong)
        hint = f'did you mean "{".".join([*parts[:at], meant, *parts[at + 1 :]])}"?'
        return Problem("is not in the document", tuple(parts), "not-there", hint, "command line")
    elsewhere = "" if meant or known is None else explain_unknown(tuple(parts[:-1]), parts[-1], known).hint
    if elsewhere.startswith(("it belongs ", 'did you mean "type"')):
        return Problem("unknown key", tuple(parts), "unknown-key", elsewhere, "command line")
    hint = f'did you mean "{meant}"? (to add {key}: +{key}=...)' if meant else f"to add it: +{key}=..."
    return Problem("is not in the document", tuple(parts), "not-there", hint, "command line")


def _is_value(schema: contract.Schema) -> bool:
    """Whether a key takes numbers, texts or lists only."""
    kinds = schema.get("type", "object")
    return "enum" in schema or "object" not in ([kinds] if isinstance(kinds, str) else kinds)


def split_key(key: str) -> Path:
    """Splits a path that OmegaConf writes as `a.b[0]`."""
    parts = re.sub(r"\[([^\]]+)\]", r".\1", key).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts if part)
