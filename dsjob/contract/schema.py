"""The contract as data: the JSON Schema files joined into one tree, and functions that query it.

The files in `schemas/` are the only place for shape, bounds, defaults and texts. Besides JSON Schema's keywords, they
have these annotations, which other validators ignore:

- `x-status`, with `x-note`: `mapped` (to what), `no-effect` or `unsupported` (why). A section's status applies to all
  its keys.
- `x-form`: what a `pattern` accepts, in words, for messages.
- `x-instead`: the value that `dsjob import` writes instead of an unsupported one.
- `x-aliases`: other spellings of the key.
- `x-replaced-by`: what to use instead of a deprecated key.
- `x-auto`: the string "auto" is accepted; the value is then derived, or counts as unset.
- `x-place`: the value is a path or URL that a run may `read`, or `write`; see `access`.
- `x-unsuggested`: the key is another name of one elsewhere, and is no suggestion for a misspelt key.
- `x-deepspeed`: DeepSpeed's name for a key; at the root of deepspeed.json, the version whose defaults are listed.
- `x-inherits`: unset keys in this section inherit from the job, so defaults are not filled in.

Hydra composes on a tree derived from the schemas in which every key is present but unset. So `trainer.micro_batch=4`
needs no `+`, a misspelt key is an error, and "not set" stays distinct from "set to the default" until `resolve`. null
means not set, except among a target's arguments.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

from dsjob.contract.paths import Path, is_comment
from dsjob.contract.resources import read_schema

Schema = dict[str, Any]


@cache
def job_schema() -> Schema:
    """The job document's schema with all references resolved; callers must not change it."""
    return _join("job.schema.json")


@cache
def deepspeed_schema() -> Schema:
    """The schema of a bare DeepSpeed config."""
    return _join("deepspeed.json")


def _join(name: str) -> Schema:
    root = read_schema(name)
    joined: Schema = _inline(root, root)
    return joined


def _inline(node: Any, root: Schema) -> Any:
    """`node` with references replaced by their targets, and aliases added as keys of their own."""
    if isinstance(node, list):
        return [_inline(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        file, _, pointer = node["$ref"].partition("#")
        home = read_schema(file) if file else root
        target: Any = home
        for part in pointer.strip("/").split("/") if pointer else []:
            target = target[part]
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return {**_inline(target, home), **_inline(siblings, root)}
    joined = {key: _inline(value, root) for key, value in node.items() if key != "$defs"}
    properties = joined.get("properties")
    if isinstance(properties, dict):
        for key, value in list(properties.items()):
            for alias in value.get("x-aliases", ()) if isinstance(value, dict) else ():
                properties[alias] = {**value, "deprecated": True, "x-alias-of": key}
    return joined


# By id of a schema: schemas are cached for ever (`job_schema`), so an id is never used again.
_HOMES: dict[int, dict[str, list[tuple[str, ...]]]] = {}


def list_homes(schema: Schema) -> dict[str, list[tuple[str, ...]]]:
    """For each key of a (joined, cached) schema, the paths of the objects that have it."""
    if id(schema) not in _HOMES:
        homes: dict[str, list[tuple[str, ...]]] = {}
        places: list[tuple[tuple[str, ...], Schema]] = [((), schema)]
        while places:
            path, node = places.pop()
            for key, below in node.get("properties", {}).items():
                hidden = not isinstance(below, dict) or "deprecated" in below or "x-unsuggested" in below
                if key == "deepspeed" or key.startswith("_") or hidden:
                    continue
                homes.setdefault(key, []).append(path)
                places.append(((*path, key), below))
            for branch in node.get("allOf", ()):
                params = branch.get("then", {}).get("properties", {}).get("params", {})
                listed = params.get("properties", {})
                homes.update({key: [(*path, "params")] for key in listed if "deprecated" not in listed[key]})
        _HOMES[id(schema)] = homes
    return _HOMES[id(schema)]


def is_target(schema: Schema) -> bool:
    """Whether the schema describes a `_target_` object, whose other keys are arguments."""
    return "_target_" in schema.get("properties", {})


def _branch(section: Schema, kind: Any) -> Schema:
    """The schemas of keys that depend on the `type` of an optimizer or scheduler; empty if the type is not listed."""
    for branch in section.get("allOf", ()):
        rule = branch.get("if", {}).get("properties", {}).get("type", {})
        named = (
            rule.get("const") == kind if "const" in rule else bool(re.search(rule.get("pattern", r"(?!)"), str(kind)))
        )
        if named:
            found: Schema = branch["then"]["properties"]
            return found
    return {}


def params_schema(section: Schema, kind: Any) -> Schema | None:
    """The schema of `params` for the `type` of an optimizer or scheduler; None if its arguments are not listed."""
    found: Schema | None = _branch(section, kind).get("params")
    return found


def child(schema: Schema, key: str, value: Any = None) -> Schema | None:
    """The schema of `key` in an object described by `schema`. `value`: that object, whose `type` may select a more
    specific schema. None if the key is not known."""
    properties = schema.get("properties", {})
    if key in properties:
        found: Schema = properties[key]
        typed = _branch(schema, value.get("type")).get(key) if "allOf" in schema and isinstance(value, dict) else None
        return {**found, **typed} if typed else found
    if "else" in schema and "properties" in schema.get("else", {}):
        return child(schema["else"], key, value)
    rest = schema.get("additionalProperties")
    return rest if isinstance(rest, dict) else None


def find_at(schema: Schema, path: Path, document: Any) -> Schema:
    """The schema of the value at `path` in `document`, whose own schema is `schema`; empty if there is none."""
    node: Schema | None = schema
    for part in path:
        if node is None:
            return {}
        node = node.get("items") if isinstance(part, int) else child(node, part, document)
        inside = (
            isinstance(document, list) if isinstance(part, int) else isinstance(document, dict) and part in document
        )
        document = document[part] if inside else None
    return node or {}


def prune(value: Any, schema: Schema) -> Any:
    """`value` without unset keys (nulls and empty sections) and without comments.

    A target's arguments are kept as they are.
    """
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if is_comment(key):
            continue
        below = child(schema, key, value)
        if below is None:  # an argument of a target, or an unknown key that `check` will report
            kept[key] = item
            continue
        if key == "params" and isinstance(item, dict):
            item = {name: argument for name, argument in item.items() if argument is not None}
        else:
            item = prune(item, below)
        if item is not None and item != {}:
            kept[key] = item
    return kept


def fill_defaults(value: dict[str, Any], schema: Schema, *, idle: bool = False) -> dict[str, Any]:
    """`value` with defaults for all unset keys that have an effect; for those without an effect only if `idle`.

    "auto" counts as unset where it is allowed.
    """
    filled = dict(value)
    for key, below in schema.get("properties", {}).items():
        if key == "params" and "_target_" in value:  # in a target, `params` would become an argument
            continue
        acts = idle or "x-status" not in below
        if filled.get(key) == "auto" and below.get("x-auto") and acts:
            del filled[key]
        if key not in filled and "default" in below and acts and "x-alias-of" not in below:
            filled[key] = copy.deepcopy(below["default"])
        if isinstance(filled.get(key), dict) and acts and "x-inherits" not in below:
            inner = child(schema, key, filled)
            filled[key] = fill_defaults(filled[key], inner or below, idle=idle)
    return filled


def sort_keys(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """`value` with its keys in the order of the schema; arguments of targets come last, in their own order."""
    order = {key: index for index, key in enumerate(schema.get("properties", {}))}
    return {
        key: sort_keys(item, child(schema, key, value) or {}) if isinstance(item, dict) else item
        for key, item in sorted(value.items(), key=lambda pair: order.get(pair[0], len(order)))
    }


def unset_tree(schema: Schema) -> dict[str, Any]:
    """Every key of the job document, unset: the tree that Hydra composes on, so that a misspelt key is an error."""
    tree: dict[str, Any] = {}
    for key, below in schema["properties"].items():
        sections = below.get("properties")
        if key in ("params", "param_groups") or "x-inherits" in below or (below.get("default") == {} and not sections):
            tree[key] = {}
        elif sections and (not is_target(below) or "params" in sections):
            tree[key] = unset_tree(below)
        else:
            tree[key] = None
    return tree
