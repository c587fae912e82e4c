"""Whatever is imported: a job of the right shape, or an error of dsjob's own. Never a traceback."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from imports import list_unmentioned

from dsjob.contract import schema as contract
from dsjob.contract.check import check_shape
from dsjob.contract.paths import get_at
from dsjob.contract.trainer_arguments import ARGUMENTS, SCRIPT_ARGUMENTS
from dsjob.document import parse
from dsjob.errors import DsjobError
from dsjob.importing import accelerate, determined
from dsjob.importing.command_line import Command, find_commands
from dsjob.importing.gather import import_sources
from dsjob.importing.given import is_open
from dsjob.importing.methods import OPTIMIZERS
from dsjob.importing.schedules import SCHEDULES
from dsjob.importing.settle import Imported
from dsjob.importing.sources import Source, SourceKind

WORDS = [
    "auto", "no", "steps", "epoch", "full_shard auto_wrap", "zero_dp_3 offload", "true", "apex", "bf16", "fp16", "cpu",
    "t5-small", "a.csv", "", *OPTIMIZERS, *SCHEDULES,
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2000),
    st.floats(-1, 2, allow_nan=False),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def objects(keys: list[str], inner: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys) | st.text(min_size=1, max_size=6), inner, min_size=1, max_size=8)


def deepspeed_configs() -> st.SearchStrategy[dict[str, Any]]:
    properties = contract.deepspeed_schema()["properties"]
    sections = {
        key: objects(list(below["properties"])) | VALUES for key, below in properties.items() if "properties" in below
    }
    methods = st.fixed_dictionaries(
        {"type": st.sampled_from(["Adam", "SGD", "WarmupLR", "WarmupDecayLR", "OneCycle"])},
        optional={"params": objects(["lr", "betas", "warmup_num_steps", "total_num_steps", "max_grad_norm"])},
    )
    flat = objects([key for key in properties if key not in sections])
    nested = st.fixed_dictionaries({}, optional={**sections, "optimizer": methods, "scheduler": methods})
    return st.builds(lambda one, other: {**one, **other} or {"zero_optimization": {}}, flat, nested)


def take(kind: SourceKind, content: dict[str, Any]) -> Source:
    return Source(kind, f"{kind}.json", parse(json.dumps(content, indent=1), f"{kind}.json"))


OPEN = ("scheduler.params.warmup_num_steps", "scheduler.params.num_warmup_steps")


def require_sound(imported: Imported) -> None:
    """Nothing in the document is of a wrong shape, and `validate` finds nothing else, but for what a note names."""
    for problem in check_shape(imported.document, contract.job_schema()):
        open_end = problem.rule in ("unsupported", "required") or problem.dotted in OPEN
        open_end = open_end or is_open(get_at(imported.document, problem.path))
        assert problem.severity != "error" or open_end, problem
    json.dumps(imported.document, allow_nan=False)
    assert list_unmentioned(imported) == []


def attempt(found: list[Source], command: Command | None = None) -> None:
    try:
        imported = import_sources(found, command)
    except DsjobError:
        return  # refused in words
    require_sound(imported)


def read_shell(text: str) -> list[Command]:
    try:
        return find_commands(text, "run.sh")
    except DsjobError:
        return []


@FEW
@given(deepspeed_configs())
def test_deepspeed_configs(config: dict[str, Any]) -> None:
    attempt([take("deepspeed", config)])


@FEW
@given(objects([*ARGUMENTS, *SCRIPT_ARGUMENTS]), deepspeed_configs(), st.booleans())
def test_arguments(arguments: dict[str, Any], config: dict[str, Any], beside: bool) -> None:
    found = [take("arguments", arguments), *([take("deepspeed", config)] if beside else [])]
    attempt(found)


@FEW
@given(objects([*determined.KEYS]))
def test_experiments_of_determined(content: dict[str, Any]) -> None:
    attempt([take("determined", content)])


@FEW
@given(objects([*accelerate.KEYS, "fsdp_sharding_strategy", "fsdp_offload_params", "fsdp_reshard_after_forward"]))
def test_accelerate_files(content: dict[str, Any]) -> None:
    attempt([take("accelerate", content)])


OPTIONS = [
    f"--{name}" for name in [*ARGUMENTS, *SCRIPT_ARGUMENTS, "num_gpus", "nproc_per_node", "include", "zero_stage"]
]


@FEW
@given(
    st.sampled_from(["deepspeed", "torchrun --nproc_per_node 2", "accelerate launch", "python", "python -m"]),
    st.lists(st.sampled_from([*OPTIONS, "3", "0.5", "'a b'", "\\\n", "$X", "{}", "x=1", *WORDS]), max_size=12),
)
def test_commands(launcher: str, words: list[str]) -> None:
    for command in read_shell(f"{launcher} train.py {' '.join(words)}"):
        attempt([], command)


@FEW
@given(st.text(alphabet="ab -'\"\\\n#$;&|<>=.{}1", max_size=40))
def test_shell_texts(text: str) -> None:
    for command in read_shell(f"python {text}"):
        attempt([], command)
