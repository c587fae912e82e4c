"""Spellings of earlier years: what they stand for, and what is said of them, in jobs and in bare DeepSpeed configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, nowhere, resolve, write_json

from dsjob.contract.legacy import expand, find_spelling
from dsjob.document.bare import resolve_config
from dsjob.document.compose import compose
from dsjob.document.origins import read_document
from dsjob.document.resolve import resolve_job
from dsjob.errors import ConfigError
from dsjob.front.validate import validate_file as validate

Z = "zero_optimization"
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({Z: {"stage": 2, "cpu_offload": True}}, {Z: {"stage": 2, "offload_optimizer": CPU}}),
        ({Z: {"stage": 2, "cpu_offload": False}}, {Z: {"stage": 2}}),
        ({Z: {"cpu_offload_param": True}}, {Z: {"offload_param": CPU}}),
        ({Z: {"cpu_offload_params": True}}, {Z: {"offload_param": CPU}}),
        (
            {Z: {"cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True}},
            {Z: {"offload_optimizer": {**CPU, "pin_memory": True}, "offload_param": {**CPU, "pin_memory": True}}},
        ),
        ({Z: {"cpu_offload_use_pin_memory": True}}, {Z: {}}),
        (
            {Z: {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "ratio": 0.5}}},
            {Z: {"offload_optimizer": {"device": "nvme", "ratio": 0.5}}},
        ),
        ({Z: True}, {Z: {"stage": 1}}),
        ({Z: False}, {Z: {"stage": 0}}),
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, {"bf16": {"enabled": False}}),
        ({"sharded_ddp": "simple"}, {Z: {"stage": 1}}),
        ({"sharded_ddp": "simple offload"}, {Z: {"stage": 1, "offload_optimizer": CPU}}),
        ({"sharded_ddp": "zero_dp_2"}, {Z: {"stage": 2}}),
        ({"sharded_ddp": "zero_dp_2 cpu_offload"}, {Z: {"stage": 2, "offload_optimizer": CPU}}),
        ({"sharded_ddp": "zero_dp_3 auto_wrap"}, {Z: {"stage": 3}}),
        ({"sharded_ddp": "zero_dp_3 auto_wrap cpu_offload"}, {Z: {"stage": 3, "offload_param": CPU}}),
        ({"sharded_ddp": "zero_dp_2", Z: {"stage": 3}}, {Z: {"stage": 3}}),
        ({Z: {"stage": 3}, "bf16": {"enabled": True}}, {Z: {"stage": 3}, "bf16": {"enabled": True}}),
    ],
)
def test_an_old_spelling_is_put_into_todays_keys(old: dict[str, Any], now: dict[str, Any]) -> None:
    assert expand(old) == now
    assert expand(now) == now


@pytest.mark.parametrize(
    ("path", "document", "given"),
    [
        ((Z, "offload_optimizer", "device"), {Z: {"cpu_offload": True}}, (Z, "cpu_offload")),
        ((Z, "offload_param", "device"), {Z: {"cpu_offload_params": True}}, (Z, "cpu_offload_params")),
        (
            (Z, "offload_optimizer", "pin_memory"),
            {Z: {"cpu_offload": True, "cpu_offload_use_pin_memory": True}},
            (Z, "cpu_offload_use_pin_memory"),
        ),
        ((Z, "offload_param", "device"), {Z: {"offload_param": CPU}}, (Z, "offload_param", "device")),
        ((Z, "offload_param", "device"), {"sharded_ddp": "zero_dp_3 offload"}, ("sharded_ddp",)),
        (("bf16", "enabled"), {"bfloat16": {"enabled": True}}, ("bfloat16", "enabled")),
        (("bf16", "enabled"), {"bf16": {"enabled": True}}, ("bf16", "enabled")),
        (("trainer", "seed"), {}, ("trainer", "seed")),
    ],
)
def test_a_path_of_today_is_found_where_it_was_given(
    path: tuple[str, ...], document: dict[str, Any], given: tuple[str, ...]
) -> None:
    assert find_spelling(path, document) == given


def lines(name: str, document: dict[str, Any]) -> list[str]:
    write_json(Path(name), document)
    return [str(problem) for problem in validate(name, None)[0]]


# What is written, and the rules that speak of it: (path, rule).
SPELLINGS: list[tuple[dict[str, Any], set[tuple[str, str]]]] = [
    ({Z: True}, {(Z, "deprecated")}),
    ({Z: False}, {(Z, "deprecated")}),
    (
        {Z: {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}},
        {
            (f"{Z}.cpu_offload", "deprecated"),
            (f"{Z}.cpu_offload_use_pin_memory", "deprecated"),
        },
    ),
    ({Z: {"cpu_offload": False}}, {(f"{Z}.cpu_offload", "deprecated")}),
    (
        {Z: {"stage": 1, "cpu_offload_params": True}},
        {
            (f"{Z}.cpu_offload_params", "deprecated"),
            (f"{Z}.cpu_offload_params", "offload-param-stage"),
        },
    ),
    (
        {Z: {"stage3_gather_fp16_weights_on_model_save": True}},
        {(f"{Z}.stage3_gather_fp16_weights_on_model_save", "deprecated")},
    ),
]


@pytest.mark.parametrize(("section", "told"), SPELLINGS, ids=[str(case[0]) for case in SPELLINGS])
@pytest.mark.parametrize("kind", ["job", "section", "config"])
def test_validate_names_the_old_spelling_at_its_place(
    kind: str, section: dict[str, Any], told: set[tuple[str, str]]
) -> None:
    documents = {
        "job": make_job(**section),
        "section": make_job(deepspeed=section),
        "config": {"train_batch_size": 8, **section},
    }
    write_json(Path("x.json"), documents[kind])
    problems, texts = validate("x.json", None)
    prefix = "deepspeed." if kind == "section" else ""
    found = {(problem.dotted.removeprefix(prefix), problem.rule) for problem in problems}
    assert found == told
    for problem in problems:
        key = str(problem.path[-1])
        assert texts["x.json"].split("\n")[problem.line - 1][problem.column - 1 :].startswith(f'"{key}"')
        mild = ("deprecated", "no-effect", *(["offload-param-stage"] if kind == "config" else []))
        assert problem.severity == ("warning" if problem.rule in mild else "error")


def test_bfloat16_is_an_old_name_in_a_deepspeed_config() -> None:
    on = {"bfloat16": {"enabled": True}}
    (told,) = lines("ds.json", {"train_batch_size": 8, **on})
    assert told == "ds.json:3:3: warning[deprecated]: bfloat16: is an old spelling; use bf16"
    spec, _ = resolve_config({"train_batch_size": 8, **on}, world_size=1, locate=nowhere)
    assert spec.bf16.enabled
    assert resolve(make_job(deepspeed=on))["bf16"] == resolve(make_job(bf16={"enabled": True}))["bf16"]
    (told,) = lines("job.json", make_job(**on))  # there have never been jobs with it
    assert told.endswith('error[unknown-key]: bfloat16: unknown key; did you mean "bf16"?')


@pytest.mark.parametrize(("flag", "stage"), [(True, 1), (False, 0)])
def test_a_flag_for_zero_is_a_stage_on_every_way(flag: bool, stage: int) -> None:
    warning = f"is an old spelling; use zero_optimization.stage: {stage}"
    spec, warnings = resolve_config({"train_batch_size": 8, Z: flag}, world_size=1, locate=nowhere)
    assert (spec.zero_optimization.stage, [w.rule for w in warnings]) == (stage, ["deprecated"])
    (told,) = lines("ds.json", {"train_batch_size": 8, Z: flag})
    assert told == f"ds.json:3:3: warning[deprecated]: zero_optimization: {warning}"
    done = resolve_job(make_job(**{Z: flag}), world_size=1, locate=nowhere)
    assert (done.document[Z]["stage"], [w.rule for w in done.warnings]) == (stage, ["deprecated"])
    assert resolve(make_job(deepspeed={Z: flag}))[Z]["stage"] == stage
    write_json(Path("job.json"), make_job(**{Z: flag}))
    for override, expected in (("trainer.seed=1", stage), ("zero=stage3", 3), (f"{Z}.stage=2", 2)):
        composed = compose([override], file=read_document("job.json"))
        assert resolve(composed.document, locate=composed.locate)[Z]["stage"] == expected


@pytest.mark.parametrize(("words", "stage"), [("simple", 1), ("zero_dp_2", 2), ("zero_dp_3 auto_wrap", 3)])
def test_fairscales_flags_are_a_stage(words: str, stage: int) -> None:
    done = resolve_job(make_job(sharded_ddp=words), world_size=1, locate=nowhere)
    assert done.document[Z]["stage"] == stage
    assert "sharded_ddp" not in done.document
    assert [(w.dotted, w.rule) for w in done.warnings] == [("sharded_ddp", "deprecated")]


def test_a_mistake_in_what_fairscales_flags_stand_for_is_told_at_them() -> None:
    flags = make_job(sharded_ddp="zero_dp_3 auto_wrap cpu_offload", zero_optimization={"stage": 2})
    *_, told = lines("job.json", flags)
    assert told.startswith("job.json:21:3: error[offload-param-stage]: sharded_ddp: stands for")
    told = lines("job.json", make_job(sharded_ddp="zero_dp_4"))[-1]
    assert "error[pattern]: sharded_ddp" in told


def test_warnings_stay_beside_the_errors_of_a_config() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config({"train_batch_size": 8, Z: {"cpu_offload": True, "stage": 0}}, world_size=1, locate=nowhere)
    assert [problem.rule for problem in caught.value.problems] == ["offload-optimizer-stage"]
    assert [problem.rule for problem in caught.value.warnings] == ["deprecated"]
