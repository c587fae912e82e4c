"""The published contract: three views, each of which (or a part of which) is a JSON Schema for editors.

`job` is the job document, `recipe` is what Hydra composes one from (fragments, interpolations, a defaults list), and
`deepspeed` is a bare DeepSpeed config. `schema` holds the contract and answers questions about documents; nothing is
checked here. `reference` makes the texts for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from urllib.parse import quote

from dsjob.contract import schema as contract
from dsjob.contract.schema import Schema

VIEWS = ("job", "recipe", "deepspeed")
STATUSES = {"mapped": "mapped", "no-effect": "no effect here", "unsupported": "not supported"}

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_AUTO = "^auto$"
_OPEN = (r"\$\{", r"^\?\?\?$")  # an interpolation, or OmegaConf's mark for a missing value that must be given
_DEFAULTS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": {"type": ["string", "array", "null"], "items": {"type": "string"}},
            },
        ]
    },
    "description": "Hydra's defaults list: the configs that this one builds on, in order; "
    "`override /optimizer: adamw` selects one of a group.",
}
_HYDRA: Schema = {
    "type": "object",
    "description": "Settings of Hydra itself, for example the launcher and sweeper of `dsjob -m`.",
}


@cache
def read_view(name: str) -> Schema:
    """A view as one tree; callers must not change it.

    Branches that only distinguish objects from other kinds of values are merged into the node. If a `type` determines
    what `params` may hold, `params` has `x-variants`: the schemas by the names of the types.
    """
    view = _arrange(contract.deepspeed_schema() if name == "deepspeed" else contract.job_schema())
    if name == "recipe":
        view["properties"] = {"defaults": _DEFAULTS, **view["properties"], "hydra": _HYDRA}
        view["title"] = "dsjob recipe"
    return view


def to_json_schema(view: str, path: tuple[str, ...], node: Schema) -> Schema:
    """`node`, which is at `path` in `view`, as a self-contained schema: no references, and keys that editors can list.

    It accepts "auto" where that is allowed. In the recipe view, keys may also be missing, null or interpolations.
    """
    published = _publish(node, recipe=view == "recipe")
    if path and view == "recipe":  # the section is the root of a file in a config group
        for owner in (published, published.get("else", {})):
            if "properties" in owner:
                owner["properties"] = {"defaults": _DEFAULTS, **owner["properties"]}
    root = read_view(view)
    name = quote("/".join((view, *path)))
    return {
        "$schema": _DIALECT,
        "$id": f"{root['$id'].rpartition('/')[0]}/view/{name}.json",
        "title": " ".join((root["title"], ".".join(path))).strip(),
        **{key: value for key, value in published.items() if key not in ("$schema", "$id", "title")},
    }


def describe_status(schema: Schema) -> str:
    """The status of a key and the reason for it; empty if the key is implemented."""
    status = schema.get("x-status", "")
    note = schema.get("x-note", "")
    return ": ".join(part for part in (STATUSES.get(status, status), note) if part)


def describe_age(schema: Schema) -> str:
    """What to write instead of a deprecated key or another spelling; empty for other keys."""
    if "x-alias-of" in schema:
        return f"another spelling of {schema['x-alias-of']}"
    now = schema.get("x-replaced-by", "")
    return (f"deprecated: use {now}" if now else "deprecated") if schema.get("deprecated") else ""


def _map_schemas(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A copy of `schema` with `change` applied to the schemas one level below, except to conditions (`if`, `not`)."""
    changed = dict(schema)
    for key, value in schema.items():
        if key == "properties":
            changed[key] = {name: change(below) if isinstance(below, dict) else below for name, below in value.items()}
        elif key in ("allOf", "anyOf", "oneOf"):
            changed[key] = [change(below) for below in value]
        elif key in ("items", "additionalProperties", "then", "else") and isinstance(value, dict):
            changed[key] = change(value)
    return changed


def _arrange(schema: Schema) -> Schema:
    arranged = _map_schemas(schema, _arrange)
    if arranged.get("if") == {"not": {"type": "object"}} and "then" not in arranged:
        # The branch's keywords only apply to objects, so they can be merged with those for other types.
        branch = arranged.pop("else")
        del arranged["if"]
        arranged = {**branch, **arranged}
    variants = dict(_list_variants(arranged))
    if variants:
        params = {**arranged["properties"]["params"], "x-variants": variants}
        arranged["properties"] = {**arranged["properties"], "params": params}
    return arranged


def _list_variants(section: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas of `params`, each with the names of its types; they include the status of the type."""
    for branch in section.get("allOf", ()):
        rule = branch.get("if", {}).get("properties", {}).get("type")
        typed = branch.get("then", {}).get("properties", {})
        if rule is not None and "params" in typed:
            status = {key: typed["type"][key] for key in ("x-status", "x-note") if key in typed.get("type", ())}
            yield ", ".join(_name_types(rule, section, branch)), {**typed["params"], **status}


def _name_types(rule: Schema, section: Schema, branch: Schema) -> list[str]:
    """The names of the types that a condition matches: those it lists; for a pattern, the matching words in the title
    of the branch and in the description of `type`."""
    if "const" in rule:
        return [rule["const"]]
    if "enum" in rule:
        return list(rule["enum"])
    texts = (branch.get("title", ""), section["properties"]["type"].get("description", ""))
    words = dict.fromkeys(word for word in re.findall(r"\w+", " ".join(texts)) if re.search(rule["pattern"], word))
    return list(words) or [re.sub(r"\[(.)[^\]]*\]|[\^$]", r"\1", rule["pattern"])]


def _publish(schema: Schema, *, recipe: bool) -> Schema:
    published = _map_schemas(schema, lambda below: _publish(below, recipe=recipe))
    for key in ("$schema", "$id", "x-variants"):
        published.pop(key, None)
    if recipe:
        published.pop("required", None)  # a fragment need not be complete
        if "propertyNames" in schema.get("then", {}):  # without _target_, a fragment may hold arguments or named sets
            published = {key: value for key, value in published.items() if key not in ("if", "then", "else")}
    if "description" in schema:
        published["description"] = _describe(schema)
    if False in (published.get("additionalProperties"), published.get("unevaluatedProperties")):
        published["patternProperties"] = {"^_comment": {}}
    params = schema.get("properties", {}).get("params")
    if isinstance(params, dict) and "x-variants" in params:
        variants = {
            names: below for names, below in params["x-variants"].items() if below.get("x-status") != "unsupported"
        }
        names = [name for names in variants for name in names.split(", ")]
        properties = published["properties"]
        # Not all editors suggest keys that are only in branches (`then`), so list them here as well.
        properties["params"]["properties"] = _join_variants(variants)
        properties["type"]["examples"] = names
    return _open(published, recipe=recipe)


def _describe(schema: Schema) -> str:
    """The description, plus what editors do not show: the default, deprecation and status."""
    parts = [schema.get("description", "")]
    if schema.get("default") not in (None, {}):
        parts.append(f"Default: {json.dumps(schema['default'])}.")
    notes = (describe_age(schema), describe_status(schema))
    parts += [f"{note[0].upper()}{note[1:]}." for note in notes if note]
    return " ".join(parts).strip()


def _join_variants(variants: dict[str, Schema]) -> dict[str, Schema]:
    """Every argument of every type, with descriptions but without constraints, which differ between types."""
    texts: dict[str, dict[str, list[str]]] = {}
    for names, params in variants.items():
        for key, below in params.get("properties", {}).items():
            texts.setdefault(key, {}).setdefault(_describe(below), []).append(names)
    return {
        key: {"description": "\n\n".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())}
        for key, by_text in texts.items()
    }


def _open(schema: Schema, *, recipe: bool) -> Schema:
    """`schema`, extended to accept placeholders: "auto" where allowed, and in a recipe null, `${...}` and `???`."""
    auto = bool(schema.get("x-auto"))
    if not (auto or recipe) or not {"type", "enum", "const"} & set(schema):
        return schema
    opened = dict(schema)
    patterns = [*([_AUTO] if auto else []), *(_OPEN if recipe else ())]
    if auto:
        opened["examples"] = ["auto"]
    if "enum" in schema or "const" in schema:
        options = list(opened.pop("enum", None) or [opened.pop("const")])
        opened.pop("type", None)
        options += ["auto"] if auto else []
        if not recipe:
            return {**opened, "enum": options}
        return {**opened, "anyOf": [{"enum": [*options, None]}, {"type": "string", "pattern": "|".join(patterns)}]}
    types = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
    if "string" not in types:
        opened["pattern"] = "|".join(patterns)
    elif "pattern" in schema:
        opened["pattern"] = "|".join([f"(?:{schema['pattern']})", *patterns])
    return {**opened, "type": list(dict.fromkeys([*types, "string", *(["null"] if recipe else [])]))}
