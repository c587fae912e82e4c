"""DeepSpeed configs: their names in a job document, and how a job is built on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dsjob.contract import deepspeed_keys, legacy
from dsjob.contract.schema import Schema, deepspeed_schema, job_schema
from dsjob.errors import Problem

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
    "zero_optimization": {"stage": 2},
}


def build(
    job: dict[str, Any], config: dict[str, Any], *, overridden: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    before = copy.deepcopy((job, config))
    result = deepspeed_keys.build_on(
        job, config, place=lambda path: "/".join(map(str, path)), overridden=lambda path: overridden
    )
    assert (job, config) == before
    return result


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("train_batch_size", ("trainer", "train_batch")),
        ("train_micro_batch_size_per_gpu", ("trainer", "micro_batch")),
        ("gradient_accumulation_steps", ("trainer", "grad_accum")),
        ("steps_per_print", ("trainer", "log_every")),
        ("gradient_clipping", ("gradient_clipping",)),
        ("communication_data_type", ("communication_data_type",)),
    ],
)
def test_keys_find_their_place_in_the_job_and_back(theirs: str, ours: tuple[str, ...]) -> None:
    job = deepspeed_keys.to_job({theirs: 7})
    for part in ours:
        job = job[part]
    assert job == 7  # type: ignore[comparison-overlap]
    assert deepspeed_keys.to_config_path(ours) == (theirs,)


def test_a_path_below_a_section_stays_what_it_is() -> None:
    assert deepspeed_keys.to_config_path(("zero_optimization", "stage")) == ("zero_optimization", "stage")
    assert deepspeed_keys.to_config_path(("trainer", "seed")) == ("trainer", "seed")


def test_every_key_of_a_config_has_a_place_or_a_status_at_every_leaf() -> None:
    def has_status(schema: Schema) -> bool:
        below = schema.get("properties", {})
        return "x-status" in schema or (bool(below) and all(has_status(item) for item in below.values()))

    of_programs = {"managed_gradient_accumulation"}  # an engine looks it up in its config; a rule refuses it in a job
    for key, below in deepspeed_schema()["properties"].items():
        assert deepspeed_keys.to_job(legacy.expand({key: {}})) or has_status(below) or key in of_programs, key


def test_a_key_is_mapped_where_it_has_another_name_in_the_job() -> None:
    for key, below in deepspeed_schema()["properties"].items():
        if key in deepspeed_keys.CALLBACKS:
            assert below["x-note"].startswith(f"callbacks, as dsjob.callbacks.{deepspeed_keys.CALLBACKS[key]}")
            continue
        placed = deepspeed_keys.to_job({key: 1})
        assert (below.get("x-status") == "mapped") == (bool(placed) and key not in placed), key
        if below.get("x-status") == "mapped":
            ((section, value),) = placed.items()
            assert below["x-note"] == f"{section}.{next(iter(value))}"
            assert job_schema()["properties"][section]["properties"][next(iter(value))]["x-deepspeed"] == key
        for section in placed:
            assert section in job_schema()["properties"]


def test_a_job_is_built_on_the_config() -> None:
    merged, problems = build({"trainer": {"max_steps": 3}, "optimizer": {"params": {"eps": 1}}}, CONFIG)
    assert problems == []
    assert merged == {
        "trainer": {"max_steps": 3, "micro_batch": 4},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1}},
        "zero_optimization": {"stage": 2},
    }


@pytest.mark.parametrize(
    "job",
    [
        {"gradient_clipping": 0.5},
        {"trainer": {"micro_batch": 4.0}},
        {"trainer": {"micro_batch": "auto"}},
        {"optimizer": {"params": {"betas": [0.8, 0.9]}}},
    ],
)
def test_equal_values_and_auto_do_not_contradict(job: dict[str, Any]) -> None:
    merged, problems = build(job, CONFIG)
    assert problems == []
    assert merged["trainer"]["micro_batch"] == 4
    assert merged["gradient_clipping"] == 0.5


def test_auto_in_the_config_leaves_the_job_its_value() -> None:
    merged, problems = build({"trainer": {"micro_batch": 8}}, {"train_micro_batch_size_per_gpu": "auto"})
    assert (merged["trainer"]["micro_batch"], problems) == (8, [])


def test_a_contradiction_names_both_places() -> None:
    _, (found,) = build({"trainer": {"micro_batch": 8}}, CONFIG)
    assert found.path == ("trainer", "micro_batch")
    assert found.rule == "conflict"
    assert found.message == (
        "is 8 (trainer/micro_batch), but deepspeed.train_micro_batch_size_per_gpu says 4 "
        "(deepspeed/train_micro_batch_size_per_gpu)"
    )


def test_all_contradictions_are_found() -> None:
    _, found = build({"gradient_clipping": 1, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"}}, CONFIG)
    assert {problem.dotted for problem in found} == {"gradient_clipping", "zero_optimization.stage", "optimizer.type"}


def test_what_overrides_the_config_contradicts_nothing() -> None:
    merged, problems = build({"trainer": {"micro_batch": 8}, "gradient_clipping": 1}, CONFIG, overridden=True)
    assert problems == []
    assert merged["trainer"]["micro_batch"] == 8
    assert merged["gradient_clipping"] == 1


@pytest.mark.parametrize(
    "optimizer",
    [{"type": "SGD", "params": {"momentum": 0.9}}, {"_target_": "mine.SGD", "lr": 1}, {"type": "SGD", "params": {}}],
)
def test_another_optimizer_does_not_inherit_the_arguments_of_the_configs(optimizer: dict[str, Any]) -> None:
    merged, _ = build({"optimizer": optimizer}, CONFIG, overridden=True)
    assert merged["optimizer"] == optimizer


@pytest.mark.parametrize(
    "optimizer", [{"type": "adam", "params": {"eps": 1}}, {"type": "AdamW"}, {"params": {"eps": 1}}]
)
def test_the_same_optimizer_and_a_mere_other_type_do(optimizer: dict[str, Any]) -> None:
    merged, _ = build({"optimizer": optimizer}, CONFIG, overridden=True)
    assert merged["optimizer"]["params"]["lr"] == 0.1


def test_find_origin_tells_whose_value_it_is() -> None:
    job = {"trainer": {"max_steps": 3, "micro_batch": 8}, "optimizer": {"type": "Adam"}}
    found = {
        path: deepspeed_keys.find_origin(path, job, CONFIG)
        for path in (("trainer", "max_steps"), ("trainer", "micro_batch"), ("gradient_clipping",), ("nowhere",))
    }
    assert found == {
        ("trainer", "max_steps"): ("trainer", "max_steps"),
        ("trainer", "micro_batch"): ("trainer", "micro_batch"),
        ("gradient_clipping",): ("deepspeed", "gradient_clipping"),
        ("nowhere",): ("nowhere",),
    }
    del job["trainer"]["micro_batch"]  # type: ignore[attr-defined]
    origin = deepspeed_keys.find_origin(("trainer", "micro_batch"), job, CONFIG)
    assert origin == ("deepspeed", "train_micro_batch_size_per_gpu")


@pytest.mark.parametrize(
    ("number", "expected"), [(1, "start 1 rank (world size 1)"), (4, "start 4 ranks (world size 4)")]
)
def test_a_hint_counts_ranks_in_plain_english(number: int, expected: str) -> None:
    hint = f"use launch.nproc={number} (world size {number})"
    assert deepspeed_keys.to_config_words(Problem("", (), "batch", hint)).hint == expected
