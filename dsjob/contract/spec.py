"""The typed job: frozen dataclasses that are views of a resolved document.

There are no defaults and no checks here: defaults are in `schemas/`, checks in `check` and `resolve`. A test compares
these classes with the schemas.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, NewType, TypeVar, cast

from dsjob.contract.divided import ContextParallel, TensorParallel
from dsjob.contract.lengths import Length, read_length
from dsjob.contract.monitors import Comet, Mlflow, MonitorFiles, Wandb
from dsjob.contract.precisions import Bf16, DataTypes, Dtype, Fp16, TorchAutocast
from dsjob.contract.stages import Pipeline
from dsjob.contract.zero import Aio as Aio
from dsjob.contract.zero import Zero as Zero

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """An object to build: the dotted path of a callable, and its arguments as they are in the document."""

    path: str
    arguments: Mapping[str, Any]


Sets = NewType("Sets", dict[str, Target])  # sets of data by name; a single set has the name ""


@dataclass(frozen=True, slots=True)
class Data:
    train: Target | None  # None only if the job does not train
    eval: Sets
    test: Sets
    loader: Target | None
    collate: Target | None
    shuffle: bool
    shuffle_buffer: int
    group_by_length: bool
    num_workers: int | None
    pin_memory: bool

    def list_sets(self, *roles: Literal["eval", "test"]) -> dict[str, Target]:
        """The sets of these roles by the prefix of their metrics: `eval`, or `eval/NAME` for each of several."""
        return {
            f"{role}/{name}" if name else role: target
            for role in roles
            for name, target in (self.eval if role == "eval" else self.test).items()
        }


@dataclass(frozen=True, slots=True)
class Trainer:
    train_batch: int
    micro_batch: int
    grad_accum: int
    loss_average: Literal["targets", "batches"]
    max_steps: int | None
    max_epochs: float | None
    max_length: Length | None
    seed: int
    matmul_precision: Literal["highest", "high", "medium"] | None
    log_every: Length
    eval_at_start: bool
    eval_every: Length
    eval_batches: int | None
    eval_micro_batch: int | None
    parts: Target | None
    step: Target | None
    disable_auto_grad_accumulation: bool
    eval_step: Target | None
    mpu: Target | None
    model_parallel_size: int


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    mode: Literal["none", "full", "selective"]
    interval: int
    partition_activations: bool
    number_checkpoints: int | None
    contiguous_memory_optimization: bool
    synchronize_checkpoint_boundary: bool
    profile: bool
    cpu_checkpointing: bool


@dataclass(frozen=True, slots=True)
class Compile:
    enabled: bool
    backend: str
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    fullgraph: bool
    dynamic: bool | None


@dataclass(frozen=True, slots=True)
class Ops:
    """Whether to use each native op."""

    cpu_optimizers: Literal["auto", "require", "off"]
    onebit: Literal["auto", "require", "off"]
    transformer: Literal["auto", "require", "off"]
    lamb: Literal["auto", "require", "off"]
    linear_cross_entropy: Literal["auto", "require", "off"]


@dataclass(frozen=True, slots=True)
class Method:
    """An optimizer or scheduler: `type` with `params`, or a target. `param_groups`: ordered rules by name."""

    type: str | None
    params: Mapping[str, Any]
    target: Target | None
    param_groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.type or (self.target.path if self.target else "")


@dataclass(frozen=True, slots=True)
class Predict:
    outputs: Mapping[str, str] | None
    format: Literal["jsonl", "safetensors"]
    batches: int | None
    dir: str | None


# Values of a batch or of a model's output: a list of keys (texts and integers) for positional arguments, or a mapping
# of argument names to keys.
Keys = NewType("Keys", object)

# `tokenizer`, and settings with the names of transformers' GenerationConfig.
Generation = NewType("Generation", Mapping[str, Any])

LOSS_KEYS = ("weight", "outputs", "targets")  # dsjob's keys, next to the target's own arguments


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """One of several losses: its target, its factor in the sum, and what it is called with instead of the job's
    predictions and targets."""

    target: Target
    weight: float
    outputs: Keys | None
    targets: Keys | None


METRIC_KEYS = ("inputs", "reduce", "phases")  # dsjob's keys, next to the target's own arguments


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its target, its inputs, how the values of batches are combined, and the phases that compute it."""

    target: Target
    inputs: Mapping[str, str] | None
    reduce: Target | None
    phases: Sequence[Literal["eval", "train"]]


@dataclass(frozen=True, slots=True)
class BestCheckpoints:
    metric: str
    mode: Literal["min", "max"] | None  # None until the run has asked the metric itself
    keep: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    dir: str | None
    every: Length
    every_minutes: float | None
    every_epochs: float | None
    at_end: bool
    on_signal: bool
    keep: int
    keep_every: int
    best: BestCheckpoints | None
    load_best_at_end: bool
    save_on_error: Literal["stop", "warn"]
    resume: str
    ema: bool
    strict: bool
    on_corrupt: Literal["stop", "previous"]
    single_writer: bool
    async_: bool


@dataclass(frozen=True, slots=True)
class Launch:
    nproc: int
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "gloo", "nccl"]
    timeout: float
    init_distributed: Target | None
    grace: float
    include: Sequence[int] | None
    exclude: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Output:
    dir: str


@dataclass(frozen=True, slots=True)
class Monitors:
    tensorboard: MonitorFiles | None
    csv_monitor: MonitorFiles | None
    wandb: Wandb | None
    comet: Comet | None
    mlflow: Mlflow | None
    custom: Mapping[str, Target]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the engine needs: everything that a DeepSpeed config can set."""

    trainer: Trainer
    gradient_clipping: float
    gradient_allreduce_op: Literal["mean", "sum"]
    prescale_gradients: bool
    gradient_predivide_factor: float
    communication_data_type: Dtype | None
    bf16: Bf16
    fp16: Fp16
    torch_autocast: TorchAutocast
    data_types: DataTypes
    zero_optimization: Zero
    activation_checkpointing: ActivationCheckpointing
    pipeline: Pipeline
    tensor_parallel: TensorParallel
    context_parallel: ContextParallel
    compile: Compile
    ops: Ops
    aio: Aio
    optimizer: Method | None
    scheduler: Method | None
    monitor: Monitors


@dataclass(frozen=True, slots=True)
class JobSpec(EngineSpec):
    """A whole job."""

    name: str
    model: Target | None
    models: Mapping[str, Mapping[str, Any]] | None
    tasks: Sequence[str]
    data: Data
    predict: Predict
    generation: Generation | None
    inputs: Keys | None
    targets: Keys | None
    outputs: Keys | None
    loss: Target | None
    losses: Mapping[str, NamedLoss]
    label_smoothing: float
    metrics: Mapping[str, Metric]
    engine: Literal["dsjob", "deepspeed"]
    checkpoint: Checkpoint
    callbacks: Mapping[str, Target]
    launch: Launch
    output: Output

    @property
    def trains(self) -> bool:
        """Whether training is among the job's tasks."""
        return "train" in self.tasks

    @property
    def model_ranks(self) -> int:
        """The ranks that hold one model together."""
        parts = self.context_parallel.size * self.tensor_parallel.ranks
        return self.trainer.model_parallel_size * self.pipeline.size * parts

    @property
    def driven(self) -> bool:
        """Whether the installed DeepSpeed trains in place of dsjob's own engine."""
        return self.engine == "deepspeed"


def view(cls: type[T], document: Mapping[str, Any]) -> T:
    """`document` (resolved: complete and checked) as an object of `cls`; keys that are no fields of `cls` are
    ignored."""
    hints = typing.get_type_hints(cls)
    # The field for a key that is a Python keyword ends with `_` (async_).
    names = {item.name: item.name.removesuffix("_") for item in fields(cast(Any, cls))}
    given = {name: _convert(hints[name], document.get(key)) for name, key in names.items()}
    return cls(**given)


def _convert(hint: Any, value: Any) -> Any:
    """A JSON value as the type that a field is annotated with."""
    if hint is Sets:
        sets = {"": value} if value and "_target_" in value else value or {}
        return Sets({name: make_target(item) for name, item in sets.items()})
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        # Optional fields are the only unions here: take the arm that is not None.
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        origin = typing.get_origin(hint)
    if hint is Target:
        return make_target(value)
    if hint is Length:
        return read_length(value)
    if hint is Method:
        groups = value.get("param_groups", {})
        rest = {key: item for key, item in value.items() if key != "param_groups"}
        target = make_target(rest) if "_target_" in rest else None
        return Method(value.get("type"), value.get("params", {}), target, groups)
    if hint is NamedLoss:
        target = make_target({key: item for key, item in value.items() if key not in LOSS_KEYS})
        return NamedLoss(target, value.get("weight", 1.0), value.get("outputs"), value.get("targets"))
    if hint is Metric:
        return _make_metric(value)
    if is_dataclass(hint):
        return view(cast("type[Any]", hint), value)
    if origin is Mapping and typing.get_args(hint)[1] in (Target, Metric, NamedLoss):
        return {name: _convert(typing.get_args(hint)[1], item) for name, item in value.items()}
    return value


def _make_metric(value: Mapping[str, Any]) -> Metric:
    reduce = value.get("reduce")
    target = make_target({key: item for key, item in value.items() if key not in METRIC_KEYS})
    phases: Any = value.get("phases") or ("eval",)
    return Metric(target, value.get("inputs"), make_target(reduce) if reduce else None, phases)


def make_target(value: Mapping[str, Any]) -> Target:
    """The `Target` for a `{_target_: ..., **arguments}` object."""
    return Target(path=value["_target_"], arguments={k: v for k, v in value.items() if k != "_target_"})
