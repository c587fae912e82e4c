"""The schemas as data, that every key of DeepSpeed is in them, what is asked of them, and that every recipe fits."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, resolve, resolve_composed
from jsonschema import Draft202012Validator

from dsjob.contract import schema as contract
from dsjob.contract.check import check_job
from dsjob.contract.deepspeed_keys import to_job
from dsjob.contract.resources import read_schema
from dsjob.contract.schema import Schema
from dsjob.document.compose import compose
from dsjob.document.resolve import resolve_job
from dsjob.document.sizes import read_nproc

FILES = sorted(item.name for item in resources.files("dsjob.schemas").iterdir() if item.name.endswith(".json"))
RECIPES = sorted(
    item.name.removesuffix(".yaml")
    for item in resources.files("dsjob.conf").joinpath("recipe").iterdir()
    if item.name.endswith(".yaml")
)
OWN_KEYWORDS = {
    "x-status",
    "x-note",
    "x-unsuggested",
    "x-form",
    "x-instead",
    "x-aliases",
    "x-auto",
    "x-alias-of",
    "x-replaced-by",
    "x-deepspeed",
    "x-inherits",
    "x-place",
}
KEYS = (Path(__file__).parents[1] / "data" / "deepspeed_keys.txt").read_text().splitlines()
TYPES = {
    "optimizer": [
        "Adam",
        "AdamW",
        "SGD",
        "Adagrad",
        "Lamb",
        "Lion",
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
        "Muon",
    ],
    "scheduler": [
        *("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"),
        *("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr"),
        *("polynomial", "inverse_sqrt", "warmup_stable_decay"),
    ],
}


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every property at every level, those of `params` for each type among them."""
    for key, below in schema.get("properties", {}).items():
        if below is True:  # named again by a branch, described above it
            continue
        yield f"{path}{key}", below
        yield from walk(below, f"{path}{key}.")
        if isinstance(below.get("additionalProperties"), dict):
            yield f"{path}{key}.*", below["additionalProperties"]
            yield from walk(below["additionalProperties"], f"{path}{key}.*.")
        yield from walk(below.get("items", {}), f"{path}{key}[].")
        for kind in TYPES.get(key, ()) if "allOf" in below else ():
            found = contract.params_schema(below, kind)
            assert found is not None, kind
            yield from walk(found, f"{path}{key}.params[{kind}].")
        if "properties" in below.get("else", {}):
            yield from walk(below["else"], f"{path}{key}.")


PROPERTIES = dict(walk(contract.job_schema()))  # the keys of a DeepSpeed config among them, under `deepspeed`


def find(wrong: Callable[[Schema], bool]) -> list[str]:
    return [path for path, schema in PROPERTIES.items() if wrong(schema)]


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_a_schema_that_names_itself_and_its_section(name: str) -> None:
    schema = read_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"https://dsjob.dev/schemas/1/{name}"
    assert schema["title"]
    assert schema["description"]


def test_there_are_schemas_and_properties_to_look_at() -> None:
    assert {"job.schema.json", "deepspeed.json", "trainer.json"} <= set(FILES)
    assert {"trainer.seed", "zero_optimization.offload_param.device", "optimizer.params[Adam].lr"} <= set(PROPERTIES)
    assert {"metrics.*._target_", "deepspeed.train_batch_size"} <= set(PROPERTIES)


@pytest.mark.parametrize("joined", [contract.job_schema, contract.deepspeed_schema])
def test_the_joined_schema_is_one_without_references(joined: Any) -> None:
    Draft202012Validator.check_schema(joined())
    assert '"$ref"' not in json.dumps(joined())
    assert '"$defs"' not in json.dumps(joined())


def test_every_property_says_what_it_takes() -> None:
    assert find(lambda schema: not {"type", "enum", "const"} & set(schema)) == []


def test_every_property_says_what_it_means() -> None:
    assert find(lambda schema: not schema.get("description", "").endswith((".", ")"))) == []


def test_every_default_is_valid_itself() -> None:
    assert find(lambda s: "default" in s and not Draft202012Validator(s).is_valid(s["default"])) == []


def test_what_does_nothing_under_its_name_says_so_in_one_of_three_ways() -> None:
    assert find(lambda schema: schema.get("x-status") not in (None, "mapped", "no-effect", "unsupported")) == []
    assert find(lambda schema: not {key for key in schema if key.startswith("x-")} <= OWN_KEYWORDS) == []


def test_what_does_nothing_says_why() -> None:
    assert find(lambda schema: ("x-status" in schema) != bool(schema.get("x-note"))) == []


def test_an_unsupported_switch_has_a_default_to_leave_it_at() -> None:
    unsupported = lambda schema: schema.get("x-status") == "unsupported"  # noqa: E731
    assert find(lambda s: unsupported(s) and s.get("type") == "boolean" and "default" not in s) == []


def test_an_object_that_lists_its_keys_says_whether_it_takes_others() -> None:
    def is_silent(schema: Schema) -> bool:
        return "properties" in schema and "additionalProperties" not in {**schema, **schema.get("else", {})}

    assert find(is_silent) == []


def test_a_deprecated_key_names_what_replaces_it_or_why_nothing_does() -> None:
    told = {"x-alias-of", "x-replaced-by"}
    assert find(lambda schema: bool(schema.get("deprecated")) and not told & set(schema)) == []


def test_every_key_of_stage_3_has_its_short_name_too() -> None:
    keys = contract.deepspeed_schema()["properties"]["zero_optimization"]["properties"]
    long = [key for key in keys if key.startswith("stage3_") and "x-alias-of" not in keys[key]]
    assert len(long) == 9
    assert {key: keys[key.removeprefix("stage3_")]["x-alias-of"] for key in long} == {key: key for key in long}


DEEPSPEED = dict(walk(contract.deepspeed_schema()))


@pytest.mark.parametrize("line", [line for line in KEYS if not line.startswith("#")])
def test_every_key_of_deepspeed_is_there_with_its_default(line: str) -> None:
    path, given, default = line.partition(" = ")
    schema = DEEPSPEED[path]
    assert schema["description"]
    if given:
        assert schema["default"] == json.loads(default)
        assert type(schema["default"]) is bool or type(json.loads(default)) is not bool
    else:
        assert schema.get("default", {}) == {}


def test_no_section_of_deepspeed_takes_keys_that_are_not_listed() -> None:
    def takes_any(schema: Schema) -> bool:
        rest = schema.get(
            "additionalProperties", {**schema, **schema.get("else", {})}.get("additionalProperties", True)
        )
        return schema.get("type") == "object" and (rest is True or rest == {})

    programs_own = ["tensor_parallel.tp.mpu", "tensor_parallel.tp.tp_group"]  # objects that no file can hold
    by_type = ["optimizer.params", "scheduler.params"]
    found = [path for path, schema in DEEPSPEED.items() if takes_any(schema)]
    assert sorted(found) == sorted(programs_own + by_type)


def test_the_version_of_the_defaults_is_named() -> None:
    assert read_schema("deepspeed.json")["x-deepspeed"] == "0.19.6"


def test_the_names_that_deepspeed_has_for_keys_of_a_job_are_deepspeeds() -> None:
    named = {path: s["x-deepspeed"] for path, s in PROPERTIES.items() if "x-deepspeed" in s and path != "deepspeed"}
    assert named["trainer.train_batch"] == "train_batch_size"
    assert set(named.values()) <= set(contract.deepspeed_schema()["properties"])
    for path, theirs in named.items():
        section, _, key = path.partition(".")
        assert to_job({theirs: 1}) in ({section: {key: 1} if key else 1}, {}), path


def test_every_file_is_used() -> None:
    used = set(re.findall(r'"([a-z0-9_.]+\.json)', "".join(json.dumps(read_schema(name)) for name in FILES)))
    assert set(FILES) - {"job.schema.json"} <= used


def test_aliases_are_keys_of_the_same_shape_that_name_the_real_one() -> None:
    keys = contract.job_schema()["properties"]["zero_optimization"]["properties"]
    alias, real = keys["prefetch_bucket_size"], keys["stage3_prefetch_bucket_size"]
    assert alias["x-alias-of"] == "stage3_prefetch_bucket_size"
    assert alias["deprecated"]
    assert {k: v for k, v in alias.items() if k not in ("x-alias-of", "deprecated")} == real


def test_params_schema_is_that_of_the_type() -> None:
    optimizer = contract.job_schema()["properties"]["optimizer"]
    for kind in ("Adam", "adamw", "ADAM"):
        found = contract.params_schema(optimizer, kind)
        assert found is not None
        assert "betas" in found["properties"]
    sgd = contract.params_schema(optimizer, "sgd")
    assert sgd is not None
    assert "momentum" in sgd["properties"]
    assert "betas" not in sgd["properties"]
    for kind in ("Adamax", "XAdam", "RMSprop", None, 5):
        assert contract.params_schema(optimizer, kind) is None


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"])
def test_the_arguments_of_deepspeeds_schedules_are_listed(kind: str) -> None:
    assert contract.params_schema(contract.job_schema()["properties"]["scheduler"], kind)
    assert contract.params_schema(contract.job_schema()["properties"]["scheduler"], kind + "x") is None


@pytest.mark.parametrize(
    ("section", "key", "value", "known"),
    [
        ("trainer", "seed", {}, True),
        ("trainer", "sed", {}, False),
        ("metrics", "anything", {}, True),
        ("optimizer", "params", {"type": "Adam"}, True),
        ("optimizer", "params", {"type": "Adamax"}, True),
        ("deepspeed", "train_batch_size", {}, True),
        ("model", "width", {}, False),
    ],
)
def test_child_finds_the_schema_of_a_key(section: str, key: str, value: Any, known: bool) -> None:
    assert (contract.child(contract.job_schema()["properties"][section], key, value) is not None) == known


def test_prune_drops_what_is_not_set_but_no_argument_of_a_target() -> None:
    document = {
        "model": {"_target_": "a.b", "path": None, "_args_": None, "inner": {}},
        "loss": {"_target_": None},
        "trainer": {"seed": None, "max_steps": 3},
        "scheduler": {"type": None, "params": {}},
        "optimizer": {"type": "Adamax", "params": {"foreach": None, "lr": 1}},
        "metrics": {"gone": None},
        "mistyped": None,
    }
    before = copy.deepcopy(document)
    assert contract.prune(document, contract.job_schema()) == {
        "model": {"_target_": "a.b", "path": None, "inner": {}},
        "trainer": {"max_steps": 3},
        "optimizer": {"type": "Adamax", "params": {"lr": 1}},
        "mistyped": None,
    }
    assert document == before


def test_fill_defaults_fills_what_has_an_effect_and_nothing_else() -> None:
    filled = contract.fill_defaults({"zero_optimization": {"overlap_comm": False}}, contract.job_schema())
    assert filled["zero_optimization"] == {
        "overlap_comm": False,
        "stage": 0,
        "stage3_gather_16bit_weights_on_model_save": False,
        "zero_hpz_partition_size": 1,
        "mics_shard_size": -1,
    }
    assert {"seed": 42, "log_every": 20, "eval_every": 0}.items() <= filled["trainer"].items()
    assert not {"micro_batch", "max_steps"} & set(filled["trainer"])
    assert "amp" not in filled
    assert "optimizer" not in filled


def test_fill_defaults_takes_the_arguments_of_the_type_and_gives_none_to_a_target() -> None:
    schema = contract.job_schema()
    assert "betas" in contract.fill_defaults({"optimizer": {"type": "Adam"}}, schema)["optimizer"]["params"]
    assert contract.fill_defaults({"optimizer": {"type": "Adamax"}}, schema)["optimizer"]["params"] == {}
    target = {"_target_": "torch.optim.Adam", "lr": 1}
    assert contract.fill_defaults({"optimizer": target}, schema)["optimizer"] == target


def test_auto_where_nothing_else_derives_it_counts_as_not_given() -> None:
    document = {
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"betas": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        "zero_optimization": {"reduce_bucket_size": "auto"},
    }
    filled = contract.fill_defaults(document, contract.job_schema())
    assert filled["gradient_clipping"] == 1.0
    assert filled["bf16"]["enabled"] is False
    assert filled["optimizer"]["params"]["betas"] == [0.9, 0.999]
    assert filled["optimizer"]["params"]["weight_decay"] == 0
    assert "warmup_max_lr" not in filled["scheduler"]["params"]
    assert filled["zero_optimization"]["reduce_bucket_size"] == "auto"


def test_a_section_that_does_nothing_stays_as_it_was_given() -> None:
    given = {"torch_autocast": {"enabled": False}, "amp": {"enabled": False}}
    document = make_job(**given)
    once = resolve(document)
    assert {key: once[key] for key in given} == given
    assert resolve(copy.deepcopy(once)) == once


def test_the_type_may_say_more_of_a_key() -> None:
    optimizer = contract.job_schema()["properties"]["optimizer"]
    scaled, adam = (contract.child(optimizer, "type", {"type": kind}) for kind in ("MuSGD", "Adam"))
    assert scaled is not None
    assert (scaled["type"], scaled["x-status"]) == ("string", "unsupported")
    assert adam == optimizer["properties"]["type"]


def test_defaults_are_nobody_elses_to_change() -> None:
    schema = contract.job_schema()
    first, second = (contract.fill_defaults({"optimizer": {"type": "Adam"}}, schema) for _ in range(2))
    first["optimizer"]["params"]["betas"].append(7)
    assert second["optimizer"]["params"]["betas"] == [0.9, 0.999]
    assert contract.fill_defaults({"optimizer": {"type": "Adam"}}, schema) == second


def test_the_tree_that_hydra_composes_on_has_every_key_and_no_value() -> None:
    schema = contract.job_schema()

    def check(tree: dict[str, Any], below: Schema, path: str) -> Iterator[str]:
        assert set(tree) == set(below["properties"]), path
        for key, value in tree.items():
            yield f"{path}{key}"
            inner = below["properties"][key]
            if isinstance(value, dict) and value:
                yield from check(value, inner, f"{path}{key}.")
            else:
                assert value in (None, {}), f"{path}{key}"
                own = inner.get("properties")
                assert not own or contract.is_target(inner), f"{path}{key} has keys that are missing"

    found = list(check(contract.unset_tree(schema), schema, ""))
    assert {"trainer.micro_batch", "zero_optimization.offload_param.device", "data.train"} <= set(found)
    assert contract.prune(contract.unset_tree(schema), schema) == {}


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A recipe's name and resolved document."""
    composed = compose([f"+recipe={request.param}"])
    return request.param, resolve_composed(composed, world_size=read_nproc(composed.document))


def test_the_recipes_of_the_readme_are_there() -> None:
    assert {"quickstart", "zero2_gpt", "zero3_t5", "vision_digits"} <= set(RECIPES)


def test_every_recipe_resolves_to_a_document_without_problems(recipe: tuple[str, dict[str, Any]]) -> None:
    name, document = recipe
    assert document["name"] == name
    assert check_job(document) == []


def test_resolving_a_resolved_recipe_changes_nothing(recipe: tuple[str, dict[str, Any]]) -> None:
    _, document = recipe
    read_back = json.loads(json.dumps(document))
    done = resolve_job(copy.deepcopy(read_back), world_size=document["launch"]["nproc"], locate=lambda path: ("", 0, 0))
    assert json.dumps(done.document) == json.dumps(document)
    assert done.warnings == []


def test_resolving_a_resolved_document_with_everything_in_it_changes_nothing() -> None:
    document = make_job(
        trainer={"train_batch": "auto", "micro_batch": 2.0, "grad_accum": 3, "max_steps": 1e3, "max_epochs": 1.5},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        zero_optimization={"stage": 2, "reduce_bucket_size": 5e8, "prefetch_bucket_size": "auto"},
        deepspeed={"gradient_clipping": 0.5, "bf16": {"enabled": True}},
        metrics={"a": {"_target_": "a.b"}},
        data={"train": {"_target_": "a.b"}, "eval": {"_target_": "a.b"}},
        launch={"nproc": 2},
    )
    document["$schema"] = "https://dsjob.dev/schemas/1/job.schema.json"
    once = resolve(document, world_size=2)
    assert json.dumps(resolve(copy.deepcopy(once), world_size=2)) == json.dumps(once)
    assert list(once) == [key for key in contract.job_schema()["properties"] if key in once]
