"""The contract as data: the JSON Schema files joined into one tree, and the questions that the rest asks of it.

The files in `schemas/` are the only place for shape, bounds, defaults and texts. Keywords of our own, all of them
annotations that other validators skip: `x-status` with `x-note` (`mapped`: to what; `no-effect`, `unsupported`: why; a
section's holds for the keys in it), `x-unsupported` (values that are not supported, and why), `x-instead` (what `dsjob
import` writes in the place of those, or of an unsupported key's value), `x-aliases` (other spellings), `x-replaced-by`
(what a deprecated key is now), `x-auto` (the string "auto" stands for a value that is derived, or for nothing given),
`x-deepspeed` (DeepSpeed's name for a key; at the root of deepspeed.json the version whose defaults are listed).

The tree that Hydra composes on is derived from them with every key unset, so `trainer.micro_batch=4` needs no `+`, a
mistyped key has no place to go, and "not set" stays distinct from "set to the default" until `resolve`. null means not
set, except among a target's arguments.
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
    """The job document's schema, every reference put in its place; callers must not change it."""
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
    """`node` with references replaced by what they name, aliases listed as keys, and "auto" allowed where it may be."""
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


_HOMES: dict[int, dict[str, list[tuple[str, ...]]]] = {}


def list_homes(schema: Schema) -> dict[str, list[tuple[str, ...]]]:
    """Where each key of a (joined, kept) schema may stand: the paths of the objects that have it."""
    if id(schema) not in _HOMES:
        homes: dict[str, list[tuple[str, ...]]] = {}
        places: list[tuple[tuple[str, ...], Schema]] = [((), schema)]
        while places:
            path, node = places.pop()
            for key, below in node.get("properties", {}).items():
                if key == "deepspeed" or not isinstance(below, dict) or key.startswith("_") or "deprecated" in below:
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
    """Whether the schema is that of a `_target_` object, whose other keys are arguments."""
    return "_target_" in schema.get("properties", {})


def _branch(section: Schema, kind: Any) -> Schema:
    """What an optimizer's or scheduler's `type` makes of the section's keys; empty where it is not listed."""
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
    """The schema of `params` for an optimizer's or scheduler's `type`; None where its arguments are not listed."""
    found: Schema | None = _branch(section, kind).get("params")
    return found


def child(schema: Schema, key: str, value: Any = None) -> Schema | None:
    """The schema of `key` inside an object of `schema`; `value` is that object, whose type may say more of the key."""
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
    """The schema of what is at `path` in `document`, from that of its root; empty where none says."""
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
    """`value` without what is not set (nulls and empty sections) and without remarks.

    A target's own arguments are left as they are.
    """
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if is_comment(key):
            continue
        below = child(schema, key, value)
        if below is None:  # an argument of a target, or an unknown key that the check will name
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
    """`value` with the default of every key that does something; those without effect only if `idle`.

    "auto" where it is allowed counts as not given.
    """
    filled = dict(value)
    for key, below in schema.get("properties", {}).items():
        if key == "params" and "_target_" in value:  # of a target it would be an argument
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
    """`value` with keys in the order of the schema, arguments of targets last and as they were."""
    order = {key: index for index, key in enumerate(schema.get("properties", {}))}
    return {
        key: sort_keys(item, child(schema, key, value) or {}) if isinstance(item, dict) else item
        for key, item in sorted(value.items(), key=lambda pair: order.get(pair[0], len(order)))
    }


def unset_tree(schema: Schema) -> dict[str, Any]:
    """Every key of the job document with nothing in it: what Hydra composes on, so that a mistyped key has no place."""
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
