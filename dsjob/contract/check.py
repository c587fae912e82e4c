"""Checking a document against the contract: the home of jsonschema. Finds all problems at once and raises nothing.

`schemas/` define shape, types and bounds; the table in `rules` covers relations between keys. `batch` checks the batch
triad, which depends on the world size. Neither torch nor anything that a document names is imported. Values that would
take too long to check (only objects from Python can be that large) are refused first, because jsonschema formats whole
values into its messages.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from dsjob.contract import deepspeed_keys, hints, legacy
from dsjob.contract import schema as contract
from dsjob.contract.bounds import check_values
from dsjob.contract.hints import suggest
from dsjob.contract.models import is_trainable, take_model
from dsjob.contract.paths import Path
from dsjob.contract.rules import RULES
from dsjob.contract.rules.methods import find_meant
from dsjob.contract.rules.table import is_driven
from dsjob.contract.schema import Schema
from dsjob.contract.wording import DOTTED, describe, describe_missing, hint_at_missing, show
from dsjob.errors import Problem

_RULE_OF = {
    "minimum": "range",
    "maximum": "range",
    "exclusiveMinimum": "range",
    "exclusiveMaximum": "range",
    "minLength": "length",
    "minItems": "length",
    "maxItems": "length",
    "minProperties": "length",
    "maxProperties": "length",
    "const": "enum",
    "not": "type-and-target",
}
MAX_UNKNOWN = 50  # unknown keys of one object that are reported one by one


def check_job(document: dict[str, Any]) -> list[Problem]:
    """All problems of a job document. They have a `path`, but no file, line and column yet.

    `document`: the job merged with its DeepSpeed config, whose remaining keys may still be there as `deepspeed`.
    """
    if endless := check_values(document, ""):
        return endless
    schema = contract.job_schema()
    problems = _check_expanded(document, _check_shape(document, schema), schema)
    if is_driven(document):
        problems = [problem for problem in problems if not _has_effect_there(problem)]
    config = document.get("deepspeed")
    rest = {k: v for k, v in config.items() if k not in schema["properties"]} if isinstance(config, dict) else {}
    # Rules see DeepSpeed's own sections (elasticity, ...) and the job's keys side by side.
    whole = {**deepspeed_keys.drop_moved(rest), **document}
    found = _check_rules(whole, problems, whole=True)
    return _drop_follow_ups(problems + found + _check_models(whole, problems, found))


def _has_effect_there(problem: Problem) -> bool:
    """Whether a key that has no effect in dsjob does have one in the installed DeepSpeed, which receives it."""
    path = problem.path[1:] if problem.path[:1] == ("deepspeed",) else problem.path
    return problem.rule == "no-effect" and path[0] in deepspeed_keys.ENGINE_SECTIONS


def _check_models(document: dict[str, Any], problems: list[Problem], reported: list[Problem]) -> list[Problem]:
    """What the rules find in each of several models, except what is `reported` for the job already."""
    models = document.get("models")
    if not (isinstance(models, dict) and all(isinstance(entry, dict) for entry in models.values())):
        return []
    known = {(problem.path, problem.rule) for problem in reported}
    found = []
    for name, entry in models.items():
        below = [replace(p, path=p.path[2:]) for p in problems if p.path[:2] == ("models", name)]
        for problem in _check_rules(take_model(document, name), problems + below, whole=True):
            # A problem in a section that the model inherits from the job has no place of its own in the document:
            # it is shown at the model, with the key in the message.
            own = problem.path[:1] and problem.path[0] in entry
            if problem.rule == "no-optimizer" and is_trainable(document, name):
                found.append(replace(problem, path=("models", name, *problem.path)))
            elif problem.rule != "no-optimizer" and (own or (problem.path, problem.rule) not in known):
                message = problem.message if own else f"{problem.dotted} {problem.message}"
                path = problem.path if own else ()
                found.append(replace(problem, path=("models", name, *path), message=message))
    return found


def check_config(config: dict[str, Any]) -> list[Problem]:
    """All problems of a bare DeepSpeed config."""
    if endless := check_values(config, ""):
        return endless
    schema = contract.deepspeed_schema()
    problems = _check_expanded(config, _check_shape(config, schema), schema)
    sound = _blank_broken(config, problems)
    document = {**deepspeed_keys.drop_moved(sound), **deepspeed_keys.to_job(sound)}
    found = _check_rules(document, [replace(p, path=deepspeed_keys.to_job_path(p.path)) for p in problems], whole=False)
    found = [deepspeed_keys.to_config_words(replace(p, path=deepspeed_keys.to_config_path(p.path))) for p in found]
    return _drop_follow_ups(problems + found)


def _drop_follow_ups(problems: list[Problem]) -> list[Problem]:
    """`problems` without those about a missing key that is only misspelt or misplaced, which is reported already."""
    # Keys in the hint of an unknown key (`did you mean "max_steps"?`), except a list of all allowed keys.
    meant: set[str] = set()
    for problem in problems:
        if problem.rule == "unknown-key":
            meant |= {*map(str, problem.path[-1:]), *re.findall(r"\w+", problem.hint.partition("available")[0])}
    meant &= {*contract.list_homes(contract.job_schema()), "_target_"}  # the other words of hints are English
    missing = ("required", "no-train-data", "no-end", "no-optimizer", "no-total-steps")
    return [p for p in problems if p.rule not in missing or not meant & {*re.findall(r"\w+", p.message), *p.path[-1:]}]


def _check_expanded(document: dict[str, Any], problems: list[Problem], schema: Schema) -> list[Problem]:
    """`problems`, and those of the keys that old spellings stand for."""
    sound = _blank_broken(document, problems)
    expanded = legacy.expand(sound)
    if expanded == sound:
        return problems
    known = {(problem.path, problem.rule) for problem in problems}
    found = [p for p in _check_status(expanded, schema, ()) if (p.path, p.rule) not in known]
    return problems + [_name_as_given(problem, document) for problem in found]


def _name_as_given(problem: Problem, document: dict[str, Any]) -> Problem:
    """A problem of the expanded document, moved to the old spelling that it comes from."""
    given = legacy.find_spelling(problem.path, document)
    if given == problem.path:
        return problem
    return replace(problem, path=given, message=f"stands for {problem.dotted}: {problem.message}")


def _check_rules(document: dict[str, Any], problems: list[Problem], *, whole: bool) -> list[Problem]:
    """What the rules find in a document, except at or around problems of shape, which are reported already."""
    broken = [problem.path for problem in problems if _is_shape(problem) and problem.rule != "unknown-key"]
    broken += [path[1:] for path in broken if path[:1] == ("deepspeed",)]
    sound = legacy.expand(_blank_broken(document, problems))
    found = [
        problem for rule in RULES.values() if whole or not rule.whole for problem in rule.find(sound, bare=not whole)
    ]
    return [_name_as_given(f, document) for f in found if not any(_is_near(f.path, path) for path in broken)]


def _is_shape(problem: Problem) -> bool:
    """Whether the value has the wrong shape for its key; a value that is merely unsupported does not."""
    return problem.severity == "error" and problem.rule != "unsupported"


def _is_near(path: Path, other: Path) -> bool:
    length = min(len(path), len(other))
    return length > 0 and path[:length] == other[:length]


def _blank_broken(document: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """The document with None in place of every value of the wrong shape: neither a value, nor a missing key."""
    paths: set[Path] = {tuple(takewhile(lambda part: isinstance(part, str), p.path)) for p in problems if _is_shape(p)}
    return {key: _blank(item, (key,), paths) for key, item in document.items()}


def _blank(value: Any, path: Path, broken: set[Path]) -> Any:
    if path in broken:
        return None
    if not isinstance(value, dict):
        return value
    return {key: _blank(item, (*path, key), broken) for key, item in value.items()}


def check_shape(document: dict[str, Any], schema: Schema) -> list[Problem]:
    """The problems that the schema alone can find: unknown keys, types, bounds, and keys that dsjob does not support.

    If the type of an optimizer or schedule is misspelt, its arguments are checked as those of the type that is meant.
    """
    return check_values(document, "") or _check_shape(document, schema)


def _check_shape(document: dict[str, Any], schema: Schema) -> list[Problem]:
    document = _as_meant(document)
    validator = Draft202012Validator(schema)
    problems: dict[tuple[Path, str, str], Problem] = {}
    for error in _leaves(validator.iter_errors(document)):
        for problem in _explain(error, document, schema):
            problems.setdefault((problem.path, problem.rule, problem.message), problem)
    # A value of the wrong type also breaks an enum or a bound, and a wrong value also has a status: report each once.
    mistyped = {path for path, rule, _ in problems if rule == "type"}
    found = [p for p in problems.values() if p.rule not in ("enum", "range") or p.path not in mistyped]
    wrong = {p.path for p in found if p.rule in ("type", "enum")}
    return found + [p for p in _check_status(document, schema, ()) if p.path not in wrong]


def _as_meant(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with misspelt types of optimizers and schedules corrected."""
    changed = dict(document)
    for section in ("optimizer", "scheduler"):
        value = document.get(section)
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and (meant := find_meant(section, kind)):
            changed[section] = {**document[section], "type": meant}
    if isinstance(config := document.get("deepspeed"), dict):
        changed["deepspeed"] = _as_meant(config)
    if isinstance(models := document.get("models"), dict):
        changed["models"] = {name: _as_meant(one) if isinstance(one, dict) else one for name, one in models.items()}
    return changed


def _leaves(errors: Iterator[ValidationError]) -> Iterator[ValidationError]:
    """The errors behind `if`, `anyOf` and the like, which jsonschema nests, instead of the enclosing error."""
    for error in errors:
        if error.context:
            yield from _leaves(iter(error.context))
        else:
            yield error


def _explain(error: ValidationError, document: Any, schema: Schema) -> Iterator[Problem]:
    """An error of jsonschema as problems: one for each unknown or missing key, else one for the value."""
    path: Path = tuple(error.absolute_path)
    keyword, value = str(error.validator), error.instance
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        node = contract.find_at(schema, path, document)
        allowed: Schema = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        named = node.get("properties") or allowed
        known = [key for key, below in named.items() if not (isinstance(below, dict) and "x-alias-of" in below)]
        unknown = [key for key in value if key not in allowed] if isinstance(value, dict) else []
        for key in unknown[:MAX_UNKNOWN]:
            yield _unknown_key(path, key, known, schema)
        if len(unknown) > MAX_UNKNOWN:
            yield Problem(f"{len(unknown) - MAX_UNKNOWN} more unknown keys", path, "unknown-key")
        return
    auto = contract.find_at(schema, path, document).get("x-auto")
    if auto and value == "auto":
        return
    if keyword == "required":
        missing = re.findall(r"'([^']+)' is a required property", error.message)
        for name in missing:
            yield Problem(describe_missing(path, name), path, "required", hint_at_missing(path, name))
        return
    message, hint = describe(keyword, error.validator_value, value, form=_read_form(error))
    if keyword == "type" and "object" in str(error.validator_value):
        hint = hint or _wrap_hint(value, contract.find_at(schema, path, document))
    yield Problem(message or error.message, path, _RULE_OF.get(keyword, keyword), hint)


def _read_form(error: ValidationError) -> str:
    return str(error.schema.get("x-form", "")) if isinstance(error.schema, dict) else ""


def explain_unknown(path: Path, key: str, known: list[str]) -> Problem:
    """The problem of an unknown key in a job document, with a hint on what was probably meant."""
    return _unknown_key(path, key, known, contract.job_schema())


def _unknown_key(path: Path, key: str, known: list[str], schema: Schema) -> Problem:
    inside = path[:1] == ("deepspeed",)
    homes = contract.list_homes(contract.deepspeed_schema() if inside else schema)
    exact = [("deepspeed", *home) if inside else home for home in homes.get(key, ())]
    exact = [home for home in exact if home != path]  # arguments of other types have the same path
    below = [home for home in exact if home[: len(path)] == path]
    hint = 'did you mean "type"?' if key == "name" and "type" in known else hints.explain_login(path, key)
    if not hint and not below and path:
        hint = suggest(key, known, least=0.9)  # stage for stages, although there is a stage elsewhere
    if not hint and len(below or exact) in (1, 2):
        hint = "it belongs " + " or ".join(
            f"under {'.'.join(home)}" if home else "at the top level" for home in below or exact
        )
    bare = schema is contract.deepspeed_schema()
    elsewhere = {name: places for name, places in homes.items() if path not in places}
    hint = hint or hints.explain_key(path, key, known, bare=bare) or suggest(key, known)
    hint = hint or _suggest_elsewhere(key, elsewhere)
    if not hint and known:
        hint = "available: " + ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return Problem("unknown key", (*path, key), "unknown-key", hint)


def _suggest_elsewhere(key: str, homes: dict[str, list[tuple[str, ...]]]) -> str:
    """A hint for a key that is both misspelt and at the wrong level."""
    once = [name for name, places in homes.items() if len(places) == 1]
    near = difflib.get_close_matches(key, once, n=1, cutoff=0.8)
    return f'did you mean "{".".join((*homes[near[0]][0], near[0]))}"?' if near else ""


def _wrap_hint(value: Any, node: Schema) -> str:
    """A hint for a value that was given instead of the section that it belongs in, such as `fp16: true`."""
    properties = node.get("properties", {})
    keys = ("enabled",) if isinstance(value, bool) else ("device", "type", "stage", "_target_")
    for key in keys:
        if key in properties and Draft202012Validator(properties[key]).is_valid(value):
            return f"write {json.dumps({key: value})}"
    if "train" in properties and isinstance(value, str) and DOTTED.fullmatch(value):
        return f"write {json.dumps({'train': {'_target_': value}})}"
    return ""


def _check_status(value: Any, schema: Schema, path: Path) -> list[Problem]:
    """Keys that are known but not supported (errors, unless they are off), or that have no effect (warnings)."""
    if not isinstance(value, dict):
        return []
    problems: list[Problem] = []
    for key, item in value.items():
        below = contract.child(schema, key, value)
        if below is None or item is None:
            continue
        status, note, here = below.get("x-status"), below.get("x-note", ""), (*path, key)
        off = item == below.get("default") or (item == "auto" and below.get("x-auto"))
        off = off or (isinstance(item, dict) and item.get("enabled") in (False, "auto"))
        if status == "unsupported" and not off:
            shown = "" if isinstance(item, dict) else f"{show(item)} "
            problems.append(Problem(f"{shown}is not supported by dsjob", here, "unsupported", note))
        elif status == "no-effect":
            problems.append(Problem("has no effect here", here, "no-effect", note, severity="warning"))
        if isinstance(item, bool) and "stage" in below.get("properties", {}):
            stage = f"use {key}.stage: {int(item)}"
            problems.append(Problem("is an old spelling", here, "deprecated", stage, severity="warning"))
        original = below.get("x-alias-of")
        if original in value:
            problems.append(
                Problem(f"is another spelling of {original}, which is also given", here, "given-twice", "keep one")
            )
        elif below.get("deprecated") and item != "auto" and status != "unsupported" and original != f"stage3_{key}":
            now = below.get("x-replaced-by") or original
            unset = item is False and below.get("default") is False
            advice = "leave it out: this is the default" if unset else f"use {now}"
            problems.append(Problem("is an old spelling", here, "deprecated", advice, severity="warning"))
        problems += _check_status(item, below, here)
    return problems
