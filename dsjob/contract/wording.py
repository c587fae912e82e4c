"""Messages for values that break a keyword of JSON Schema: what is wrong, what was found, and what is allowed."""

from __future__ import annotations

import re
from typing import Any

from dsjob.contract import hints, lengths
from dsjob.contract.paths import Path
from dsjob.contract.shown import shorten

_KINDS = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "null": "null",
}
DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")


def describe(keyword: str, rule: Any, value: Any, *, form: str = "") -> tuple[str, str]:
    """Message and hint for a `value` that breaks `keyword`, whose own value is `rule`.

    `form`: in words, what a `pattern` accepts. Both are empty for keywords that the schemas do not use.
    """
    found = f"but is {show(value)}"
    if rule == lengths.PATTERN or (keyword == "type" and form.startswith("a number of steps")):
        return f"must be {form}, {found}", lengths.suggest_length(value)
    if keyword == "type":
        names = [rule] if isinstance(rule, str) else rule
        wanted = _join([_KINDS[name] for name in names if name in _KINDS])
        return f"must be {wanted}, {found}", hints.suggest_literal(value, names)
    if keyword == "enum":
        return _describe_choice(rule, value)
    if keyword == "pattern" and _is_dotted(rule):
        fixed = value.replace(":", ".")
        hint = f"write {fixed}" if DOTTED.fullmatch(fixed) else "write package.module.name"
        return f"{show(value)} is not a dotted path", hint
    texts = {
        "minimum": f"must be at least {rule}, {found}",
        "maximum": f"must be at most {rule}, {found}",
        "exclusiveMinimum": f"must be greater than {rule}, {found}",
        "exclusiveMaximum": f"must be less than {rule}, {found}",
        "minLength": "must not be empty",
        "minItems": f"must have at least {_count(rule)}, {found}",
        "maxItems": f"must have at most {_count(rule)}, {found}",
        "minProperties": "must not be empty",
        "uniqueItems": f"must not name anything twice, {found}",
        "pattern": f"must be {form or f'of the form {rule}'}, {found}",
        "not": "has both `type` and `_target_`, which exclude each other",
    }
    return texts.get(keyword, ""), ""


def _describe_choice(options: list[Any], value: Any) -> tuple[str, str]:
    shown, words = ", ".join(map(show, options)), [option for option in options if isinstance(option, str)]
    if str(value).lower() == "gpu":  # by spelling it is nearer to "cpu" than to "cuda", which is meant
        words = [word for word in words if word in ("cuda", "none")]
        hint = f'did you mean "{words[0]}"?' if words else ""
    else:
        hint = hints.suggest(str(value), words)
    return f"must be {'one of ' if len(options) > 1 else ''}{shown}, but is {show(value)}", hint


def _join(kinds: list[str]) -> str:
    """`an object, true or false`."""
    *first, last = " or ".join(kinds).split(" or ")
    return f"{', '.join(first)} or {last}" if first else last


def _count(items: int) -> str:
    return f"{items} item{'s' if items != 1 else ''}"


def _is_dotted(rule: Any) -> bool:
    return isinstance(rule, str) and rule.strip("^$") == DOTTED.pattern


def show(value: Any) -> str:
    """A value in JSON's notation, shortened."""
    return shorten(value, as_json=True)


def describe_missing(path: Path, name: str) -> str:
    """The message for an object at `path` that lacks the required key `name`."""
    return f"the required key {name} is missing" if path else f"the job has no {name} section, which is required"


def hint_at_missing(path: Path, name: str) -> str:
    """How to add the required key `name` to the object at `path`."""
    if not path and name in ("model", "data"):
        return "add it to the document, or start from a recipe: +recipe=quickstart"
    if name == "_target_":
        return "set it to the dotted path of a callable, for example my_module.build"
    if name == "type":
        return "for example type: " + ("WarmupLR" if path[-1:] == ("scheduler",) else "AdamW")
    return ""
