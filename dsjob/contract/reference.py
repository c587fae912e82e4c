"""The contract as documentation: the values and meaning of each key, as text for a terminal (`dsjob schema KEY`) and as
the pages of `docs/reference`, which `python -m dsjob.contract.reference docs/reference` writes.

The schema trees come from `views`.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dsjob.contract import deepspeed_keys
from dsjob.contract import schema as contract
from dsjob.contract.hints import explain_key, suggest
from dsjob.contract.resources import read_schema
from dsjob.contract.schema import Schema
from dsjob.contract.views import describe_age, describe_status, read_view
from dsjob.errors import UsageError
from dsjob.terminal import print_lines

Keys = tuple[str, ...]

ANY = "<name>"  # the path part for the keys of a map, which users choose
COMMAND = "python -m dsjob.contract.reference docs/reference"
_MARK = f"<!-- Made from schemas/ by `{COMMAND}`: edit the schemas, not this page. -->\n\n"
_LEGEND = (
    "Status: *implemented* keys do what they say; *mapped* keys are translated to other settings, which are named; "
    "*no effect here* is a warning, used only if ignoring the key cannot change results; *not supported* is an error; "
    "*by key* means that the section's keys differ in status. A *target* is [an object made by calling "
    "something](target.md). `auto` means that dsjob derives the value; `dsjob show` prints the result. "
    "`dsjob schema KEY` prints this reference in a terminal."
)
_BY_KEY = "by key"
_WIDTH = 100
_COLUMNS = ("Key", "Type", "Default", "Status", "Description", "DeepSpeed", "In a job", "Other spellings")
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minLength": "not empty",
}


@dataclass(frozen=True)
class Entry:
    """A key of a view.

    `types`: for an argument of an optimizer or schedule, the types that have it. `within`: the status of the enclosing
    section or type, which applies if the key has none of its own.
    """

    view: str
    path: Keys
    schema: Schema
    types: str = ""
    required: bool = False
    within: str = ""

    @property
    def dotted(self) -> str:
        """The path as written on the command line."""
        return ".".join(self.path)


def find(view: str, dotted: str) -> list[Entry]:
    """The key at a dotted path: one entry, or one per type for arguments. Raises UsageError for an unknown path."""
    entries = [Entry(view, (), read_view(view))]
    for part in dotted.split(".") if dotted else ():
        found = [below for entry in entries for below in _list_keys(entry) if below.path[-1] in (part, ANY)]
        if not found:
            raise _unknown(dotted, entries[0], part)
        entries = found
    return entries


def _list_keys(entry: Entry) -> Iterator[Entry]:
    """The keys one level below, including other spellings."""
    schema = entry.schema
    inside = replace(entry, required=False, within=describe_status(schema) or entry.within)
    for key, below in schema.get("properties", {}).items():
        if isinstance(below, dict):
            required = key in schema.get("required", ())
            yield replace(inside, path=(*entry.path, key), schema=below, required=required)
    for types, variant in schema.get("x-variants", {}).items():
        yield from _list_keys(replace(inside, schema=variant, types=types))
    rest, items = schema.get("additionalProperties"), schema.get("items")
    if isinstance(rest, dict):
        yield replace(inside, path=(*entry.path, ANY), schema=rest)
    if isinstance(items, dict):
        yield from _list_keys(replace(inside, schema=items))


def _list_named(entry: Entry) -> list[Entry]:
    """The keys one level below, without other spellings."""
    return [below for below in _list_keys(entry) if "x-alias-of" not in below.schema]


def _list_all(entry: Entry) -> Iterator[Entry]:
    for below in _list_named(entry):
        yield below
        yield from _list_all(below)


@cache
def _everything(view: str) -> tuple[Entry, ...]:
    return tuple(_list_all(Entry(view, (), read_view(view))))


@cache
def _config_paths() -> frozenset[Keys]:
    return frozenset(entry.path for entry in _everything("deepspeed"))


def _unknown(dotted: str, owner: Entry, part: str) -> UsageError:
    """The error for an unknown path, with a hint: DeepSpeed's name for a key, the same key elsewhere, or a similar
    one here."""
    entries = _everything(owner.view)
    last = dotted.rpartition(".")[2]
    meant = [entry.dotted for entry in entries if name_elsewhere(entry) == dotted and entry.path[0] != "deepspeed"]
    meant += sorted((entry.dotted for entry in entries if entry.path[-1] == last), key=len)
    here = [below.path[-1] for below in _list_named(owner)]
    foreign = explain_key(owner.path, part, bare=owner.view == "deepspeed")
    hint = f'did you mean "{meant[0]}"?' if meant else foreign or suggest(part, here)
    if contract.is_target(owner.schema) and "type" not in owner.schema["properties"]:
        hint = "all other keys are arguments of the callable that `_target_` names"
    if not hint and here:
        hint = f"known keys: {', '.join(here)}"
    where = f"{owner.dotted} has" if owner.path else f"the {owner.view} view has"
    return UsageError(f"{where} no key {part!r}", hint=hint)


def name_elsewhere(entry: Entry) -> str:
    """The name of a job's key in a DeepSpeed config, or the other way round; "" if it exists in only one of them."""
    if entry.path and entry.path[-1].startswith("_"):  # `_target_` and the like, which DeepSpeed itself does not have
        return ""
    if entry.view == "deepspeed":
        return ".".join(_path_in_job(entry.path))
    if entry.path[:1] == ("deepspeed",):
        return ".".join(entry.path[1:])
    if entry.path and "x-deepspeed" in entry.schema:
        return str(entry.schema["x-deepspeed"])
    path: Keys = tuple(str(part) for part in deepspeed_keys.to_config_path(entry.path))
    return ".".join(path) if path in _config_paths() and _path_in_job(path) == entry.path else ""


def _path_in_job(path: Keys) -> Keys:
    top = path[:1]
    if not top:
        return ()
    moved: Any = deepspeed_keys.to_job({top[0]: None})
    if not moved:  # a section that both have (if their schemas are equal), or one that only DeepSpeed has
        ours, theirs = (read_view(view)["properties"].get(top[0], {}) for view in ("job", "deepspeed"))
        return path if {**ours, "x-deepspeed": ""} == {**theirs, "x-deepspeed": ""} else ()
    there: Keys = ()
    while isinstance(moved, dict):
        ((key, moved),) = moved.items()
        there += (key,)
    return there + path[1:]


def _is_call(schema: Schema) -> bool:
    """Whether the schema is a plain target: `_target_` and its arguments, and no keys of its own."""
    return contract.is_target(schema) and all(key.startswith("_") for key in schema["properties"])


# The values that one key accepts, in words.


def describe_type(schema: Schema, *, pattern: bool = False) -> str:
    """The values that a key accepts: `integer, at least 1, or auto`."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum") or [schema["const"]]
        text = ", ".join(_show(option) for option in options)
    elif "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        bounds = [text.format(_show(schema[key])) for key, text in _BOUNDS.items() if key in schema]
        if schema.get("minItems", -1) == schema.get("maxItems"):
            bounds = [bound for bound in bounds if not bound.endswith("items")] + [f"{schema['minItems']} items"]
        if pattern and "pattern" in schema:
            bounds.append(f"of the form {schema['pattern']}")
        text = ", ".join([" or ".join(_name_type(name, schema) for name in types), *bounds])
    else:
        text = " or ".join(describe_type(below) for below in schema.get("anyOf", ())) or "anything"
    return f"{text}, or auto" if schema.get("x-auto") else text


def _name_type(name: str, schema: Schema) -> str:
    if name == "array":
        items = schema.get("items", {})
        return f"list ({describe_type(items)})" if {"type", "enum"} & set(items) else "list"
    if name == "object":
        rest = schema.get("additionalProperties")
        if _is_call(schema):
            return "target"
        return f"map ({describe_type(rest)})" if isinstance(rest, dict) else "object"
    return name


def describe_default(schema: Schema) -> str:
    """The default as JSON; "" if there is none, or if it is empty."""
    default = schema.get("default")
    return "" if default in (None, {}) else json.dumps(default)


def _show(value: Any) -> str:
    """A value for a table: JSON, but strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _describe_state(entry: Entry) -> str:
    """Deprecation and status of a key; for a section, its own status or a summary of its keys."""
    status = describe_status(entry.schema) or entry.within or _sum_up(entry)
    return "; ".join(part for part in (describe_age(entry.schema), status) if part)


def _sum_up(entry: Entry) -> str:
    """`implemented` if all keys of a section are, otherwise `by key`. A plain key without a status is implemented."""
    is_section = {"properties", "x-variants"} & set(entry.schema) and not _is_call(entry.schema)
    works = not is_section or all(_describe_state(key) == "implemented" for key in _list_named(entry))
    return "implemented" if works else _BY_KEY


def _list_facts(entry: Entry) -> dict[str, str]:
    elsewhere = "in a job" if entry.view == "deepspeed" else "in DeepSpeed"
    facts = {
        "type": describe_type(entry.schema, pattern=True),
        "default": describe_default(entry.schema),
        "required": "yes" if entry.required else "",
        "status": _describe_state(entry),
        elsewhere: name_elsewhere(entry),
        "also spelt": "" if "x-alias-of" in entry.schema else ", ".join(entry.schema.get("x-aliases", ())),
    }
    return {name: fact for name, fact in facts.items() if fact}


# Text for a terminal.


def to_text(entry: Entry) -> str:
    """A key with all its facts, and the keys below it."""
    heading = entry.dotted or entry.schema.get("title", entry.view)
    lines = [f"{heading} ({entry.types})" if entry.types else heading]
    lines += _wrap(entry.schema.get("description", ""), 2)
    if entry.path:
        facts = _list_facts(entry)
        lines += ["", *(f"  {name:<12}  {fact}" for name, fact in facts.items())]
    types = entry.types
    for below in [] if _is_call(entry.schema) else _list_named(entry):
        if below.types != types:
            types = below.types
            status = f" ({below.within})" if below.within != entry.within else ""
            lines += ["", f"type {types}{status}"]
        state = _describe_state(replace(below, within=below.within.partition(":")[0]))
        facts = {"default": describe_default(below.schema), "required": "yes" if below.required else ""}
        shown = [f"{name} {fact}" if name == "default" else name for name, fact in facts.items() if fact]
        shown += [state] if state not in (_BY_KEY, "implemented") else []
        lines += ["", f"  {below.path[-1]}: {'; '.join([describe_type(below.schema), *shown])}"]
        lines += _wrap(below.schema.get("description", ""), 6)
    return "\n".join(lines) + "\n"


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


# The pages of docs/reference.


def make_pages() -> dict[str, str]:
    """The reference as Markdown, by file name: an index, and one page per section."""
    job, config = (Entry(view, (), read_view(view)) for view in ("job", "deepspeed"))
    target = Entry("job", ("target",), read_schema("target.json"))
    pages = {"target.md": _make_page(target), "deepspeed.md": _make_page(config)}
    for entry in (*_list_named(job), *_list_named(config)):
        if _has_page(entry):
            pages.setdefault(_page_of(entry), _make_page(entry))
    pages["index.md"] = _make_index(job)
    return pages


def write_pages(folder: Path) -> list[str]:
    """Writes the pages and deletes those of sections that no longer exist. Returns the names of the pages."""
    pages = make_pages()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in pages and path.read_text(encoding="utf-8").startswith(_MARK):
            path.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(pages)


def _make_index(job: Entry) -> str:
    rows = [_row(entry) for entry in _list_named(job)]
    pinned = job.schema.get("x-deepspeed") or read_view("deepspeed").get("x-deepspeed", "")
    notes = [
        job.schema["description"],
        f"DeepSpeed's keys have the defaults of DeepSpeed {pinned}." if pinned else "",
        _LEGEND,
    ]
    return "".join([_MARK, "# The job document\n\n", *(f"{note}\n\n" for note in notes if note), _table(rows)])


def _make_page(entry: Entry) -> str:
    title = entry.dotted if entry.view == "job" else ".".join(("deepspeed", *entry.path))
    return _MARK + f"# {title}\n\n" + "\n".join(filter(None, _render(entry, 2))) + "\n[All sections](index.md)\n"


def _render(entry: Entry, level: int) -> Iterator[str]:
    state = describe_status(entry.schema)
    yield entry.schema.get("description", "") + "\n"
    if state:
        yield f"Status: {state}.\n"
    by_types: dict[str, list[Entry]] = {}
    for below in _list_named(entry):
        by_types.setdefault(below.types, []).append(below)
    for types, entries in by_types.items():
        if types != entry.types:
            yield f"{'#' * level} Type {types}\n"
            yield f"Status: {entries[0].within}.\n" if entries[0].within != entry.within else ""
        yield _table([_row(below) for below in entries])
    for below in _list_named(entry):
        if _has_keys(below) and entry.path:
            yield f"{'#' * level} {below.dotted}\n"
            yield from _render(below, level + 1)


def _has_keys(entry: Entry) -> bool:
    # What may also be a list is a map of plain values, which its own description explains.
    if _is_call(entry.schema) or entry.schema.get("type") == ["array", "object"]:
        return False
    return any(not _is_call(below.schema) for below in _list_keys(entry))


def _has_page(entry: Entry) -> bool:
    return len(entry.path) == 1 and _has_keys(entry)


def _page_of(entry: Entry) -> str:
    """The file name of a section's page. A section that jobs and DeepSpeed configs share has one page, the job's."""
    ours = entry.view == "job" or _path_in_job(entry.path) == entry.path
    return f"{entry.path[0]}.md" if ours else f"deepspeed.{entry.path[0]}.md"


def _row(entry: Entry) -> dict[str, str]:
    key, kind = f"`{entry.path[-1]}`", describe_type(entry.schema)
    default = describe_default(entry.schema)
    elsewhere = name_elsewhere(entry)
    named = f"`{elsewhere}`" if elsewhere else ""
    return {
        "Key": f"[{key}]({_page_of(entry)})" if _has_page(entry) else key,
        "Type": kind if "enum" in entry.schema else kind.replace("target", "[target](target.md)"),
        "Default": f"`{default}`" if default else "required" if entry.required else "",
        "Status": _describe_state(replace(entry, within=entry.within.partition(":")[0])),
        "Description": entry.schema.get("description", ""),
        "In a job" if entry.view == "deepspeed" else "DeepSpeed": "the same" if elsewhere == entry.dotted else named,
        "Other spellings": ", ".join(f"`{alias}`" for alias in entry.schema.get("x-aliases", ())),
    }


def _table(rows: list[dict[str, str]]) -> str:
    """A Markdown table without empty columns."""
    columns = [column for column in _COLUMNS if any(row.get(column) for row in rows)]
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(column, "").replace("|", "\\|").replace("\n", " ") for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    written = write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))
    print_lines(f"{len(written)} pages")
