"""What "auto" stands for, entry by entry, and that none is left in a resolved document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from job_documents import make_job, nowhere, resolve

from dsjob.contract import schema as contract
from dsjob.contract.schema import Schema
from dsjob.document.auto import find_hidden_size, resolve_auto
from dsjob.document.bare import resolve_config
from dsjob.document.resolve import resolve_job

H = 48  # hidden size
Z = "zero_optimization"
ADAM = {"type": "AdamW", "params": {"lr": 0.25}}


def auto_job(path: str, value: Any = "auto", **sections: Any) -> dict[str, Any]:
    """A job with `value` at a dotted path, and a model of hidden size H."""
    job = make_job(model={"_target_": "mine.build", "d_model": H}, optimizer=ADAM)
    job |= sections
    *parents, last = path.split(".")
    section = job
    for name in parents:
        section[name] = dict(section.get(name, {}))
        section = section[name]
    section[last] = value
    return job


def get(document: dict[str, Any], path: str) -> Any:
    value: Any = document
    for part in path.split("."):
        value = value.get(part)
        if value is None:
            return None
    return value


# The resolved document leaves them out: the default applies.
TUNING = [
    "sub_group_size",
    "allgather_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "allgather_partitions",
    "round_robin_gradients",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
]
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {}}}
TABLE: list[tuple[str, Any, str, dict[str, Any]]] = [
    (f"{Z}.reduce_bucket_size", H * H, "hidden_size^2", {}),
    (f"{Z}.stage3_prefetch_bucket_size", int(0.9 * H * H), "0.9*hidden_size^2", {}),
    (f"{Z}.stage3_param_persistence_threshold", 10 * H, "10*hidden_size", {}),
    (f"{Z}.stage3_gather_16bit_weights_on_model_save", False, "the default", {}),
    *((f"{Z}.{key}", None, "the default", {}) for key in TUNING),
    ("gradient_clipping", 1.0, "the default", {}),
    ("bf16.enabled", False, "the default", {}),
    ("fp16.enabled", False, "the default", {}),
    ("amp.enabled", False, "the default", {}),
    ("amp.opt_level", None, "the default", {"amp": {"enabled": False}}),
    ("optimizer.params.lr", 5e-5, "learning_rate of TrainingArguments", {}),
    ("optimizer.params.betas", [0.9, 0.999], "the default", {}),
    ("optimizer.params.eps", 1e-8, "the default", {}),
    ("optimizer.params.weight_decay", 0, "the default", {}),
    ("scheduler.params.warmup_min_lr", 0, "the default", DECAY),
    ("scheduler.params.warmup_max_lr", 0.25, "optimizer.params.lr", DECAY),
    ("scheduler.params.warmup_num_steps", 1, "warmup_steps of TrainingArguments", DECAY),
    ("scheduler.params.total_num_steps", None, "the steps of the run", DECAY),
]


@pytest.mark.parametrize(("path", "value", "how", "sections"), TABLE, ids=[row[0] for row in TABLE])
def test_each_auto_stands_for_a_value_and_says_how(path: str, value: Any, how: str, sections: dict[str, Any]) -> None:
    done = resolve_job(auto_job(path, **sections), world_size=1, locate=nowhere)
    assert get(done.document, path) == value
    assert type(get(done.document, path)) is type(value)
    told = done.derived[tuple(path.split("."))]
    assert told.startswith("auto: ")
    assert how in told
    assert resolve(done.document) == done.document


@pytest.mark.parametrize(
    ("model", "size"),
    [
        *[({name: H}, H) for name in ("hidden_size", "d_model", "n_embd", "model_dim", "dim", "width", "hidden")],
        ({"hidden_sizes": [32, 128, 64]}, 128),
        ({"config": {"hidden_size": H}}, H),
        ({"config": {"text_config": {"hidden_size": H}}}, H),
        ({"text_config": {"d_model": H}}, H),
        ({"hidden_size": H, "config": {"hidden_size": 7}}, H),
        ({"d_model": 7, "hidden_size": H}, H),
        ({"hidden_size": 0, "d_model": H}, H),
        ({"hidden_size": True}, None),
        ({"hidden_size": "large"}, None),
        ({"hidden_size": []}, None),
        ({"layers": 12}, None),
        ({}, None),
        (None, None),
        ("mine.build", None),
    ],
)
def test_the_hidden_size_is_found_among_a_models_arguments(model: Any, size: int | None) -> None:
    assert find_hidden_size(model) == size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reduce_bucket_size", H * H),
        ("stage3_prefetch_bucket_size", int(0.9 * H * H)),
        ("prefetch_bucket_size", int(0.9 * H * H)),  # another spelling
        ("stage3_param_persistence_threshold", 10 * H),
    ],
)
@pytest.mark.parametrize("given", ["auto", 0])
def test_value_0_of_the_three_sizes_is_an_old_auto(key: str, value: int, given: Any) -> None:
    resolved = resolve(auto_job(f"{Z}.{key}", given))
    assert {name: item for name, item in resolved[Z].items() if "stage3" in name or "size" in name}.get(
        {"prefetch_bucket_size": "stage3_prefetch_bucket_size"}.get(key, key)
    ) == value


def test_a_size_that_is_given_stays() -> None:
    assert resolve(auto_job(f"{Z}.reduce_bucket_size", 7))[Z]["reduce_bucket_size"] == 7


def test_without_a_hidden_size_the_default_is_taken_and_the_names_are_told() -> None:
    job, told = resolve_auto({"model": {"_target_": "a.b"}, Z: {"reduce_bucket_size": "auto"}})
    assert job[Z] == {}
    (how,) = told.values()
    assert "the default" in how
    assert "hidden_size" in how
    assert "model" in how


def test_a_warm_up_to_the_rate_of_an_optimizer_that_is_auto_itself() -> None:
    job = make_job(
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    )
    resolved = resolve(job)
    assert resolved["optimizer"]["params"]["lr"] == 5e-5
    assert resolved["scheduler"]["params"]["warmup_max_lr"] == 5e-5


def walk(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every place of a job that takes "auto", and what has to be beside it."""
    for key, below in schema["properties"].items():
        if (key == "deepspeed" or contract.is_target(below)) and "allOf" not in below:
            continue
        if below.get("x-auto"):
            yield (*path, key), {}
        for branch in below.get("allOf", ()):
            kind = branch["if"]["properties"]["type"]
            name = kind["const"] if "const" in kind else readable(kind["pattern"])
            params = branch["then"]["properties"].get("params", {}).get("properties", {})
            needed = branch["then"]["properties"].get("params", {}).get("required", [])
            for argument, listed in params.items():
                if listed.get("x-auto"):
                    yield (*path, key, "params", argument), {"type": name, "params": dict.fromkeys(needed, 0.1)}
        if isinstance(below.get("properties"), dict):
            yield from walk({"properties": below["properties"]}, (*path, key))


def readable(pattern: str) -> str:
    """The lower-case word that a pattern of the form ^[Aa][Dd]...$ is for."""
    return "".join(part[-1] for part in pattern.strip("^$?").replace("[", "").split("]") if part)


AUTO = list(walk(contract.job_schema()))


def has_auto(value: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return bool(value == "auto")


NEEDED = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 1}}


def test_no_auto_is_left_wherever_the_schemas_allow_one() -> None:
    assert len(AUTO) > 30
    left = []
    for path, beside in AUTO:
        job = make_job()
        section: dict[str, Any] = job
        for part in path[:-1]:
            section[part] = dict(section.get(part, {}))
            section = section[part]
        if beside:
            job[path[0]] = {
                **beside,
                "params": {**beside["params"], **NEEDED.get(beside["type"], {}), path[-1]: "auto"},
            }
        else:
            section |= {"enabled": "auto"} if path[0] == "amp" else {}
            section[path[-1]] = "auto"
        if path[0] == "trainer" and path[1] == "micro_batch":
            job["trainer"]["train_batch"] = 8
        try:
            document = resolve(job)
        except Exception as error:  # which place it was
            if beside and "unsupported" in str(error):
                continue  # a type that is not built: refused before anything is resolved
            raise AssertionError(f"{path}: {error}") from error
        left += [path] if has_auto(document, path) else []
    assert left == []


def test_a_bare_config_in_which_all_is_auto_is_resolved() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        Z: {"stage": 3, "reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"},
    }
    spec, _ = resolve_config(config, world_size=3, locate=nowhere)
    assert spec.optimizer is not None
    assert spec.scheduler is not None
    assert spec.optimizer.params["lr"] == spec.scheduler.params["warmup_max_lr"] == 5e-5
    assert (spec.trainer.train_batch, spec.trainer.grad_accum) == (6, 1)
    assert "auto" not in [*spec.optimizer.params.values(), *spec.scheduler.params.values()]
