"""The published schemas: what they accept and refuse, and that editors find in them what they list and show."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from job_documents import resolve_composed
from jsonschema import Draft202012Validator

from dsjob.contract import schema as contract
from dsjob.contract.schema import Schema
from dsjob.contract.views import VIEWS, describe_status, read_view, to_json_schema
from dsjob.document import parse
from dsjob.document.compose import compose
from dsjob.document.sizes import read_nproc

ROOT = Path(__file__).parents[2]
CONF = sorted(path for path in (ROOT / "conf").rglob("*.yaml"))
RECIPES = [path.stem for path in CONF if path.parent.name == "recipe"]
CURVES = json.loads((ROOT / "tests/data/deepspeed_losses/losses.json").read_text())
BASE: dict[str, dict[str, Any]] = {
    "job": {"model": {"_target_": "a.b"}, "data": {"train": {"_target_": "a.b"}}},
    "recipe": {},
    "deepspeed": {},
}


@cache
def publish(view: str, path: tuple[str, ...] = ()) -> Schema:
    """A view, or the section of it at a path, as editors get it."""
    node = read_view(view)
    for part in path:
        node = node["properties"][part]
    return to_json_schema(view, path, node)


def is_valid(view: str, document: Any, path: tuple[str, ...] = ()) -> bool:
    return Draft202012Validator(publish(view, path)).is_valid(document)


@dataclass(frozen=True)
class Place:
    """A key and the way to it; `kind` is the type whose params it is among, if it is."""

    path: tuple[str, ...]
    schema: Schema
    kind: str = ""

    def __str__(self) -> str:
        return ".".join(self.path) + (f"[{self.kind}]" if self.kind else "")

    def document(self, view: str, value: Any) -> dict[str, Any]:
        """A document with `value` here and as little else as possible."""
        document = node = copy.deepcopy(BASE[view])
        for depth, part in enumerate(self.path[:-1]):
            node = node.setdefault(part, {})
            if part in ("optimizer", "scheduler") and self.path[depth + 1 :] not in (("type",), ("_target_",)):
                node["type"] = self.kind or "Other"
        node[self.path[-1]] = value
        if self.path[0] == "models" and len(self.path) > 2:
            document["models"]["any"].setdefault("model", {"_target_": "a.b"})
        return document


def walk(schema: Schema, path: tuple[str, ...] = (), kind: str = "") -> Iterator[Place]:
    for key, below in schema.get("properties", {}).items():
        if isinstance(below, dict):
            yield Place((*path, key), below, kind)
            yield from walk(below, (*path, key), kind)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], (*path, "any"), kind)
    for kinds, below in schema.get("x-variants", {}).items():
        for name in kinds.split(", "):
            yield from walk(below, path, name)


def places(view: str) -> list[Place]:
    return list(walk(read_view(view)))


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(below)


# ---- one document on its own


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("path", [(), ("optimizer",), ("zero_optimization", "offload_param"), ("gradient_clipping",)])
def test_it_is_a_schema_that_needs_no_other(view: str, path: tuple[str, ...]) -> None:
    schema = publish(view, path)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"https://dsjob.dev/schemas/1/view/{'/'.join((view, *path))}.json"
    assert schema["title"].endswith(".".join(path))
    assert not {"$ref", "$defs", "x-variants"} & {key for node in objects(schema) for key in node}
    assert [node["$id"] for node in objects(schema) if "$id" in node and isinstance(node["$id"], str)] == [
        schema["$id"]
    ]


def test_the_name_of_a_part_is_a_url() -> None:
    part = to_json_schema("job", ("metrics", "<name>"), {"type": "object"})
    assert part["$id"] == "https://dsjob.dev/schemas/1/view/job/metrics/%3Cname%3E.json"


def test_publishing_leaves_the_contract_as_it_is() -> None:
    before = json.dumps(contract.job_schema())
    for view in VIEWS:
        to_json_schema(view, (), read_view(view))
    assert json.dumps(contract.job_schema()) == before


# ---- what it accepts


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_job_view_accepts_what_recipes_resolve_to(recipe: str) -> None:
    composed = compose([f"+recipe={recipe}"])
    document = resolve_composed(composed, world_size=read_nproc(composed.document))
    assert list(Draft202012Validator(publish("job")).iter_errors(document)) == []


@pytest.mark.parametrize("path", CONF, ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_the_recipe_view_accepts_every_config_that_hydra_composes(path: Path) -> None:
    """Against the section that the file's package, or its folder, makes of it."""
    text = path.read_text()
    found = re.match(r"# @package (\S+)", text)
    package = found.group(1) if found else path.parent.name
    section = () if package in ("_global_", "conf") else (package,)
    document = parse(text, path.name).value
    assert list(Draft202012Validator(publish("recipe", section)).iter_errors(document)) == []


@pytest.mark.parametrize("number", range(len(CURVES)))
def test_the_deepspeed_view_accepts_the_configs_of_the_measured_curves(number: int) -> None:
    assert list(Draft202012Validator(publish("deepspeed")).iter_errors(CURVES[number]["config"])) == []


def test_auto_is_accepted_where_it_stands_for_a_value_and_nowhere_else() -> None:
    seen = set()
    for view in ("job", "deepspeed"):
        validator, plain = Draft202012Validator(publish(view)), Draft202012Validator(read_view(view))
        for place in places(view):
            document = place.document(view, "auto")
            expected = bool(place.schema.get("x-auto")) or plain.is_valid(document)
            assert validator.is_valid(document) == expected, place
            seen.add(expected)
    assert seen == {True, False}


@pytest.mark.parametrize("value", ["${a.b}", "x ${oc.env:HOME}", "${mul:${a},2}", "???", None])
def test_a_recipe_may_leave_open_what_a_value_is(value: Any) -> None:
    validator = Draft202012Validator(publish("recipe"))
    assert [str(place) for place in places("recipe") if not validator.is_valid(place.document("recipe", value))] == []


@pytest.mark.parametrize(
    "defaults",
    [
        ["base/gpt", "_self_"],
        [{"override /optimizer": "adamw"}],
        [{"optional /zero": None}, {"/callbacks": ["a", "b"]}],
        [{"/zero@zero_optimization": "stage2"}],
    ],
)
def test_a_recipe_may_have_a_defaults_list_and_settings_of_hydra(defaults: list[Any]) -> None:
    assert is_valid("recipe", {"defaults": defaults, "hydra": {"sweeper": {"n_trials": 3}}})
    assert is_valid("recipe", {"defaults": defaults, "type": "SGD"}, ("optimizer",))
    assert not is_valid("job", {**BASE["job"], "defaults": defaults})
    assert not is_valid("recipe", {"defaults": "base/gpt"})
    assert not is_valid("recipe", {"defaults": [{"a": "b", "c": "d"}]})


def test_targets_take_any_argument_in_every_view() -> None:
    for view in ("job", "recipe"):
        document = {**BASE["job"], "model": {"_target_": "a.b", "_args_": [1], "width": [1, {"x": None}]}}
        assert is_valid(view, document)


# ---- what it refuses


@pytest.mark.parametrize("view", VIEWS)
def test_a_typo_is_refused_at_every_level(view: str) -> None:
    """Each key with its last letter doubled, wherever an object lists what it takes."""
    validator = Draft202012Validator(publish(view))
    levels, accepted = set(), []
    for place in places(view):
        owner = read_view(view)
        for part in place.path[:-1]:
            owner = owner.get("properties", {}).get(part) or owner["additionalProperties"]
        if contract.is_target(owner) and "type" not in owner["properties"]:
            continue  # any other key is an argument
        typo = Place((*place.path[:-1], place.path[-1] + place.path[-1][-1]), place.schema, place.kind)
        errors = [error for error in validator.iter_errors(typo.document(view, 1)) if typo.path[-1] in error.message]
        if not any(tuple(error.absolute_path) == typo.path[:-1] for error in errors):
            accepted.append(str(typo))
        levels.add(len(typo.path))
    assert accepted == []
    assert {1, 2, 3} <= levels


VALUES = [True, -1, 0, 7, 1.5, 1e30, "", "x", "7", [], ["x"], [0.5, 0.5], {}, {"x": 1}, None]
EVERY = pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.full)])  # n-th pair of place and value


def pair(view: str, values: list[Any], every: int) -> Iterator[tuple[Place, Any]]:
    """Places with values: all pairs, or every n-th, each value at other places than the one before."""
    for row, place in enumerate(places(view)):
        yield from ((place, value) for column, value in enumerate(values) if (row + column) % every == 0)


@EVERY
@pytest.mark.parametrize("view", ["job", "deepspeed"])
def test_publishing_changes_nothing_about_what_is_accepted(view: str, every: int) -> None:
    before = contract.job_schema() if view == "job" else contract.deepspeed_schema()
    ours, theirs = Draft202012Validator(publish(view)), Draft202012Validator(before)
    for place, value in pair(view, VALUES, every):
        document = place.document(view, value)
        assert ours.is_valid(document) == theirs.is_valid(document), (place, value)


@EVERY
def test_a_recipe_refuses_the_values_that_a_job_refuses(every: int) -> None:
    """Keys that are missing apart: they come from elsewhere."""
    job, recipe = Draft202012Validator(publish("job")), Draft202012Validator(publish("recipe"))

    def refuses(validator: Draft202012Validator, view: str, place: Place, value: Any) -> bool:
        errors = validator.iter_errors(place.document(view, value))
        return any(error.validator != "required" and tuple(error.absolute_path) == place.path for error in errors)

    for place, value in pair("job", [True, -1, 7, 1.5, "x", "7", [], ["x"], {"x": 1}], every):
        assert refuses(recipe, "recipe", place, value) == refuses(job, "job", place, value), (place, value)


# ---- what editors list and show


@pytest.mark.parametrize("view", VIEWS)
def test_the_arguments_of_every_type_that_works_are_listed_and_described_without_a_branch(view: str) -> None:
    sections = publish(view)["properties"]
    for name in ("optimizer", "scheduler"):
        source = read_view(view)["properties"][name]["properties"]["params"]["x-variants"]
        working = {kinds: below for kinds, below in source.items() if below.get("x-status") != "unsupported"}
        listed = sections[name]["properties"]["params"]["properties"]
        assert set(listed) == {key for variant in working.values() for key in variant["properties"]}
        assert all(set(below) == {"description"} and below["description"] for below in listed.values())
        assert sections[name]["properties"]["type"]["examples"] == [
            kind for kinds in working for kind in kinds.split(", ")
        ]


def test_every_type_with_arguments_has_a_name_that_selects_them() -> None:
    for section in ("optimizer", "scheduler"):
        node = read_view("job")["properties"][section]
        for kinds in node["properties"]["params"]["x-variants"]:
            for kind in kinds.split(", "):
                assert kind.isidentifier(), f"give the branch of {section} for {kind} a title that names the type"
                assert contract.params_schema(node, kind) is not None


def test_a_type_is_called_as_the_title_of_its_branch_has_it_and_carries_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = copy.deepcopy(contract.job_schema())
    gone = {"x-status": "unsupported", "x-note": "not built"}
    rule = {"properties": {"type": {"pattern": "^[Oo][Dd][Dd]$"}}}
    then = {"properties": {"type": gone, "params": {"properties": {"x": {"type": "integer"}}}}}
    schema["properties"]["optimizer"]["allOf"] += [
        {"title": "For oDD alone", "if": rule, "then": then},
        {"if": {"properties": {"type": {"pattern": "^[Ee]ven$"}}}, "then": then},
    ]
    monkeypatch.setattr(contract, "job_schema", lambda: schema)
    view = read_view.__wrapped__("job")  # past the cache
    variants = view["properties"]["optimizer"]["properties"]["params"]["x-variants"]
    assert variants["oDD"] == {**gone, "properties": {"x": {"type": "integer"}}}
    assert "Even" in variants
    published = to_json_schema("job", (), view)["properties"]["optimizer"]["properties"]
    assert "oDD" not in published["type"]["examples"]
    assert "x" not in published["params"]["properties"]


def test_a_section_beside_another_kind_of_value_lists_its_keys() -> None:
    section = publish("job")["properties"]["deepspeed"]
    assert "train_batch_size" in section["properties"]
    assert "if" not in section
    assert section["description"].startswith("A DeepSpeed config to build on")


@pytest.mark.parametrize("view", VIEWS)
def test_every_key_shows_what_it_means_what_it_is_by_default_and_what_it_does_not_do(view: str) -> None:
    for place in places(view):
        if place.kind:
            continue
        shown = publish(view)
        for part in place.path:
            shown = shown.get("properties", {}).get(part) or shown["additionalProperties"]
        text = shown["description"]
        assert text.startswith(place.schema["description"]), place
        assert describe_status(place.schema).partition(": ")[2] in text
        if place.schema.get("default") not in (None, {}):
            assert f"Default: {json.dumps(place.schema['default'])}." in text
        assert {key: value for key, value in shown.items() if key.startswith("x-")} == {
            key: value for key, value in place.schema.items() if key.startswith("x-") and key != "x-variants"
        }


def test_other_spellings_are_struck_out_and_name_the_real_one() -> None:
    aliases = [place for place in places("job") if "x-alias-of" in place.schema]
    assert aliases
    assert all(place.schema["deprecated"] for place in aliases)
    alias = publish("job")["properties"]["zero_optimization"]["properties"]["prefetch_bucket_size"]
    assert alias["deprecated"] is True
    assert "Another spelling of stage3_prefetch_bucket_size." in alias["description"]
