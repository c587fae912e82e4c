"""Checking a document against the contract: the home of jsonschema. Finds all problems at once and raises nothing.

Shape, types and bounds come from `schemas/`; rules between keys are the table `RULES`. What depends on the world size
(the batch triad) is in `batch`. No import of torch, and nothing that a document names is imported.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from dsjob import schema as contract
from dsjob.errors import Problem
from dsjob.schema import Schema

Path = tuple[str | int, ...]

_PYTHON_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_KINDS = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "null": "null",
}


def check_job(document: dict[str, Any]) -> list[Problem]:
    """Everything wrong with a job document, places not yet filled in (`path` is)."""
    problems = check_shape(document, contract.job_schema())
    if any(problem.severity == "error" for problem in problems):
        return problems
    return problems + [problem for rule in RULES for problem in rule(document)]


def check_shape(document: dict[str, Any], schema: Schema) -> list[Problem]:
    """What the schema alone can tell: unknown keys, types, bounds, and keys that dsjob does not support."""
    validator = Draft202012Validator(schema)
    problems: dict[tuple[Path, str, str], Problem] = {}
    for error in _leaves(validator.iter_errors(document)):
        for problem in _explain(error, document, schema):
            problems.setdefault((problem.path, problem.rule, problem.message), problem)
    found = list(problems.values())
    return found + _check_status(document, schema, ())


def suggest(word: str, known: Sequence[str]) -> str:
    """`did you mean "x"?` for the known word nearest to `word`, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""


def _leaves(errors: Iterator[ValidationError]) -> Iterator[ValidationError]:
    for error in errors:
        if error.context:
            yield from _leaves(iter(error.context))
        else:
            yield error


def _schema_at(path: Path, document: Any, schema: Schema) -> Schema:
    node: Schema | None = schema
    value: Any = document
    for part in path:
        if node is None:
            return {}
        node = node.get("items") if isinstance(part, int) else contract.child(node, part, value)
        value = value[part]
    return node or {}


def _explain(error: ValidationError, document: Any, schema: Schema) -> Iterator[Problem]:
    path: Path = tuple(error.absolute_path)
    keyword, value = str(error.validator), error.instance
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        node = _schema_at(path, document, schema)
        allowed: Schema = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        named = node.get("properties") or allowed
        known = [key for key, below in named.items() if not (isinstance(below, dict) and "x-alias-of" in below)]
        for key in value if isinstance(value, dict) else ():
            if key not in allowed:
                yield _unknown_key(path, key, known, schema)
        return
    auto = _schema_at(path, document, schema).get("x-auto")
    if auto and value == "auto":
        return
    if keyword == "required":
        missing = re.findall(r"'([^']+)' is a required property", error.message)
        for name in missing:
            yield Problem(f"needs {name}", path, "required", _required_hint(path, name))
        return
    message, hint = _say(keyword, error.validator_value, value)
    yield Problem(message or error.message, path, keyword.lower(), hint)


def _unknown_key(path: Path, key: str, known: list[str], schema: Schema) -> Problem:
    hint = suggest(key, known)
    if not hint:
        homes = [name for name, below in schema["properties"].items() if key in below.get("properties", {})]
        if homes and (homes[0],) != path:
            hint = f"it belongs under {homes[0]}"
    if not hint and known:
        hint = "allowed here: " + ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return Problem("unknown key", (*path, key), "unknown-key", hint)


def _required_hint(path: Path, name: str) -> str:
    if not path and name in ("model", "data"):
        return "give it in the document, or start from a recipe: +recipe=quickstart"
    if name == "_target_":
        return "the dotted path of a callable, my_module.build for example"
    return ""


def _say(keyword: str, rule: Any, value: Any) -> tuple[str, str]:
    shown = _show(value)
    if keyword == "type":
        names = [rule] if isinstance(rule, str) else rule
        wanted = " or ".join(_KINDS[name] for name in names if name in _KINDS)
        found = shown if isinstance(value, bool) else f"{_kind(value)} {shown}".rstrip()
        return f"must be {wanted}, not {found}", _unquote_hint(value, names)
    if keyword == "enum":
        options = ", ".join(_show(option) for option in rule)
        words = [option for option in rule if isinstance(option, str)]
        return f"must be one of {options}, not {shown}", suggest(str(value), words)
    texts = {
        "minimum": f"must be at least {rule}, not {shown}",
        "maximum": f"must be at most {rule}, not {shown}",
        "exclusiveMinimum": f"must be greater than {rule}, not {shown}",
        "exclusiveMaximum": f"must be less than {rule}, not {shown}",
        "minLength": "must not be empty",
        "minItems": f"must have at least {rule} items",
        "maxItems": f"must have at most {rule} items",
        "pattern": f"{shown} is not of the form {rule}",
        "not": "`type` and `_target_` exclude one another",
    }
    return texts.get(keyword, ""), ""


def _unquote_hint(value: Any, names: Sequence[str]) -> str:
    if not isinstance(value, str):
        return ""
    if {"integer", "number"} & set(names):
        try:
            return f"write {float(value):g} without the quotes"
        except ValueError:
            return ""
    if "boolean" in names and value.lower() in ("true", "false"):
        return f"write {value.lower()} without the quotes"
    return ""


def _kind(value: Any) -> str:
    return _KINDS[_PYTHON_KINDS.get(type(value), "null")]


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return ""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_status(value: Any, schema: Schema, path: Path) -> list[Problem]:
    """Keys that are known but not supported (errors, unless they ask for nothing), or without effect (warnings)."""
    if not isinstance(value, dict):
        return []
    problems: list[Problem] = []
    for key, item in value.items():
        below = contract.child(schema, key, value)
        if below is None:
            continue
        status, note, here = below.get("x-status"), below.get("x-note", ""), (*path, key)
        off = item == below.get("default") or (item == "auto" and below.get("x-auto"))
        off = off or (isinstance(item, dict) and item.get("enabled") in (False, "auto"))
        if status == "unsupported" and not off:
            shown = "" if isinstance(item, dict) else f"{_show(item)} "
            problems.append(Problem(f"{shown}is not supported by dsjob", here, "unsupported", note))
        elif status == "no-effect":
            problems.append(Problem("has no effect here", here, "no-effect", note, severity="warning"))
        original = below.get("x-alias-of")
        if original in value:
            problems.append(
                Problem(f"is another spelling of {original}, which is given too", here, "alias", "keep one")
            )
        problems += _check_status(item, below, here)
    return problems


# Rules between keys. Each takes the document (of the right shape, "not set" left out) and yields problems.

Rule = Callable[[dict[str, Any]], Iterator[Problem]]


def _is_json(document: dict[str, Any]) -> Iterator[Problem]:
    """The resolved document is JSON, which has no inf and no nan; overrides and YAML configs can bring them in."""
    places: list[tuple[Path, Any]] = [((), document)]
    while places:
        path, value = places.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(f"must be a finite number, not {value}", path, "finite", "leave it out, or null")
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        places += [((*path, key), item) for key, item in items]


def _needs_an_end(document: dict[str, Any]) -> Iterator[Problem]:
    """A job that names neither steps nor epochs would never end."""
    trainer = document.get("trainer", {})
    if "max_steps" not in trainer and "max_epochs" not in trainer:
        yield Problem("needs max_steps or max_epochs", ("trainer",), "no-end", "trainer.max_steps=1000, for example")


def _needs_an_optimizer(document: dict[str, Any]) -> Iterator[Problem]:
    """Training without an optimizer changes nothing."""
    if "optimizer" not in document:
        yield Problem("needs optimizer", (), "no-optimizer", "optimizer: {type: AdamW, params: {lr: 1e-3}}")


def _evaluates_something(document: dict[str, Any]) -> Iterator[Problem]:
    """A cadence of evaluation, or metrics, without a set to evaluate on are a mistake in one place or the other."""
    if "eval" in document["data"]:
        return
    advice = "give data.eval, or leave it out"
    for key in ("eval_every", "eval_batches", "eval_at_start"):
        if document.get("trainer", {}).get(key):
            yield Problem("is set, but there is no data.eval", ("trainer", key), "no-eval-data", advice)
    if document.get("metrics"):
        yield Problem("are given, but there is no data.eval", ("metrics",), "no-eval-data", advice)


RULES: tuple[Rule, ...] = (_is_json, _needs_an_end, _needs_an_optimizer, _evaluates_something)
