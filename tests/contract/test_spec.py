"""The typed view of a job, and that it says what the schemas say."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any, Literal

import pytest
from job_documents import make_job, resolve

from dsjob.contract.deepspeed_keys import CALLBACKS, to_config_path, to_job
from dsjob.contract.divided import DividingPlan, LayerSpecs
from dsjob.contract.lengths import PATTERN, Length
from dsjob.contract.precisions import KeptBuffers
from dsjob.contract.schema import Schema, deepspeed_schema, is_target, job_schema
from dsjob.contract.spec import (
    EngineSpec,
    Generation,
    JobSpec,
    Keys,
    Method,
    Metric,
    NamedLoss,
    Sets,
    Target,
    make_target,
    view,
)
from dsjob.contract.stages import Order, Stages

NOT_IN_THE_SPEC = {"$schema", "deepspeed", "resolved"}
JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def has_effect(schema: Schema) -> bool:
    """Whether a key does anything: known by a status of its own, or by those of all keys below it."""
    if schema.get("x-status", "mapped") != "mapped" or "x-alias-of" in schema or "deprecated" in schema:
        return False
    below = schema.get("properties", {})
    return is_target(schema) or not below or any(has_effect(item) for item in below.values())


def differences(kind: type[Any], schema: Schema, path: str = "") -> Iterator[str]:
    hints = {name.removesuffix("_"): hint for name, hint in typing.get_type_hints(kind).items()}
    keys = {key: below for key, below in schema["properties"].items() if key not in NOT_IN_THE_SPEC}
    named = {key for key, below in keys.items() if has_effect(below)}
    for key in sorted(named - set(hints)):
        yield f"{path}{key} has an effect but is no field"
    for name in sorted(set(hints) - named):
        yield f"{path}{name} is a field, but no key that has an effect"
    for name in sorted(named & set(hints)):
        below = keys[name]
        filled = "default" in below and "x-status" not in below
        certain = filled or name in schema.get("required", ()) or bool(below.get("x-auto") and "x-status" not in below)
        union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        arms = typing.get_args(hints[name]) if union else (hints[name],)
        if (type(None) in arms) == certain and hints[name] is not Sets:  # without a key, there are no sets
            yield f"{path}{name} {'may be None' if certain else 'may not be None'}"
        hint = next(arm for arm in arms if arm is not type(None))
        yield from type_differences(hint, below, f"{path}{name}")


def type_differences(hint: Any, schema: Schema, path: str) -> Iterator[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Target or hint is Sets:
        agrees = is_target(schema) and (hint is Sets) == ("else" in schema) and "type" not in schema["properties"]
    elif hint is Method:
        agrees = is_target(schema) and {"type", "params"} <= set(schema["properties"])
    elif hint is Length:
        agrees = schema["type"] == ["integer", "string"] and schema["pattern"] == PATTERN
    elif hint is Generation:
        agrees = schema["type"] == "object" and "tokenizer" in schema["properties"]
    elif hint in (Order, Stages, DividingPlan):
        agrees = schema["type"] == (["integer", "string"] if hint is Stages else ["string", "object"])
    elif hint is KeptBuffers:
        agrees = schema["type"] == ["string", "array"]
    elif hint is LayerSpecs:
        agrees = schema["type"] == "array" and schema["items"]["type"] == "object"
    elif hint is Keys:
        agrees = schema["type"] == ["array", "object"]
    elif is_dataclass(hint):
        yield from differences(hint, schema, f"{path}.")  # type: ignore[arg-type]
        return
    elif origin is Literal:
        agrees = set(arguments) == set(schema["enum"])
    elif origin is Sequence:
        agrees = "array" in schema["type"] and schema["items"]["type"] == JSON_TYPES[arguments[0]]
    elif origin is Mapping:
        below = schema["additionalProperties"]
        agrees = arguments in ((str, Target), (str, Metric), (str, NamedLoss)) and is_target(below)
        agrees = agrees and (arguments[1] is Metric) == ("phases" in below["properties"])
        agrees = agrees and (arguments[1] is NamedLoss) == ("weight" in below["properties"])
        # Of several models the spec has what the document says: `resolve_model` makes a view of each.
        agrees = agrees or (arguments == (str, str) and below["type"] == "string")
        agrees = agrees or (arguments == (str, Mapping[str, Any]) and "x-inherits" in schema)
    else:
        agrees = schema.get("type") == JSON_TYPES[hint]
    if not agrees:
        yield f"{path} is {hint} in the spec, but {schema.get('type') or schema.get('enum')} in the schema"


def test_the_spec_says_what_the_schema_says() -> None:
    assert list(differences(JobSpec, job_schema())) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys: keys["trainer"]["properties"].pop("seed"), "trainer.seed is a field"),
        (lambda keys: keys["trainer"]["properties"].update(new={"type": "integer"}), "trainer.new has an effect"),
        (lambda keys: keys["trainer"]["properties"]["seed"].update(type="number"), "trainer.seed is <class 'int'>"),
        (lambda keys: keys["trainer"]["properties"]["seed"].pop("default"), "trainer.seed may not be None"),
        (lambda keys: keys["checkpoint"]["properties"]["dir"].update(default="x"), "checkpoint.dir may be None"),
        (lambda keys: keys["launch"]["properties"]["device"]["enum"].append("tpu"), "launch.device is"),
        (lambda keys: keys["amp"]["properties"]["verbosity"].pop("x-status"), "amp has an effect"),
        (lambda keys: keys.update(loss={"type": "string"}), "loss is"),
    ],
)
def test_any_difference_from_the_schema_is_found(change: Any, said: str) -> None:
    schema = copy.deepcopy(job_schema())
    change(schema["properties"])
    (difference,) = differences(JobSpec, schema)
    assert difference.startswith(said)


def test_the_engine_spec_holds_what_a_deepspeed_config_can_say() -> None:
    effective = {key for key, below in deepspeed_schema()["properties"].items() if has_effect(below)}
    effective -= {"managed_gradient_accumulation"}  # for programs: an engine looks it up in its config
    effective -= set(CALLBACKS)  # of jobs alone
    moved = to_job({key: {} if key in job_schema()["properties"] else 1 for key in effective})
    assert set(moved) == {field.name for field in fields(EngineSpec)}
    assert {to_config_path((section, key))[0] for section, keys in moved.items() for key in keys or [""]} == effective


def test_a_resolved_document_is_seen_with_its_types() -> None:
    document = make_job(
        model={"_target_": "mine.build", "width": 8, "inner": {"_target_": "mine.part"}},
        inputs=["x", 0],
        targets={"target": "y"},
        losses={
            "a": {"_target_": "mine.loss", "weight": 2, "power": 3},
            "b": {"_target_": "mine.loss", "outputs": ["z"], "targets": [1]},
        },
        data={"train": {"_target_": "mine.Data"}, "eval": {"_target_": "mine.Data"}},
        metrics={
            "accuracy": {"_target_": "mine.accuracy", "_partial_": True},
            "f1": {
                "_target_": "mine.count",
                "inputs": {"preds": "outputs.logits"},
                "reduce": {"_target_": "mine.f1"},
                "phases": ["train"],
            },
        },
        scheduler={"_target_": "mine.schedule", "power": 2},
        launch={"device": "cpu"},
    )
    spec = view(JobSpec, resolve(document))
    assert spec.model == Target("mine.build", {"width": 8, "inner": {"_target_": "mine.part"}})
    assert (spec.inputs, spec.targets, spec.outputs, spec.loss) == (["x", 0], {"target": "y"}, None, None)
    assert spec.losses == {
        "a": NamedLoss(Target("mine.loss", {"power": 3}), 2, None, None),
        "b": NamedLoss(Target("mine.loss", {}), 1.0, ["z"], [1]),
    }
    assert spec.metrics == {
        "accuracy": Metric(Target("mine.accuracy", {"_partial_": True}), None, None, ("eval",)),
        "f1": Metric(Target("mine.count", {}), {"preds": "outputs.logits"}, Target("mine.f1", {}), ["train"]),
    }
    assert spec.callbacks == {}
    assert (spec.data.list_sets("eval", "test"), spec.data.collate) == ({"eval": Target("mine.Data", {})}, None)
    assert (spec.trainer.train_batch, spec.trainer.micro_batch, spec.trainer.grad_accum) == (4, 4, 1)
    assert (spec.trainer.max_steps, spec.trainer.max_epochs) == (10, None)
    assert (spec.launch.device, spec.launch.backend) == ("cpu", "auto")
    assert spec.optimizer is not None
    assert (spec.optimizer.type, spec.optimizer.params["lr"], spec.optimizer.target) == ("AdamW", 0.001, None)
    assert spec.scheduler == Method(None, {}, Target("mine.schedule", {"power": 2}))


def test_the_engine_spec_is_a_part_of_the_job_spec() -> None:
    resolved = resolve(make_job())
    job, engine = view(JobSpec, resolved), view(EngineSpec, resolved)
    assert all(getattr(job, field.name) == getattr(engine, field.name) for field in fields(EngineSpec))


def test_a_spec_cannot_be_changed() -> None:
    spec = view(JobSpec, resolve(make_job()))
    with pytest.raises(FrozenInstanceError):
        spec.trainer.seed = 7  # type: ignore[misc]


def test_make_target_takes_the_path_from_the_arguments() -> None:
    value = {"_target_": "a.b", "x": 1}
    assert make_target(value) == Target("a.b", {"x": 1})
    assert value == {"_target_": "a.b", "x": 1}


@pytest.mark.parametrize(
    ("method", "label"),
    [(Method("Adam", {}, None), "Adam"), (Method(None, {}, Target("mine.Adam", {})), "mine.Adam")],
)
def test_a_method_is_called_by_its_type_or_its_target(method: Method, label: str) -> None:
    assert method.label == label
