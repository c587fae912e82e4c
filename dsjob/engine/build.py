"""`dsjob.initialize`: builds an engine from a model and a DeepSpeed config, for any program."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob import checkpointing
from dsjob.compute.find_blocks import mark_leaves
from dsjob.compute.precision import Precision
from dsjob.contract.model_ranks import read_context_size, read_tensor_size
from dsjob.contract.spec import EngineSpec
from dsjob.data import Epochs
from dsjob.data.passes import require_same_length
from dsjob.document.bare import complete_config, resolve_config
from dsjob.engine import configs
from dsjob.engine.batches import load_batches
from dsjob.engine.blocks import prepare_blocks
from dsjob.engine.configs import name_type
from dsjob.engine.engine import Engine
from dsjob.engine.native import choose_layers, choose_ops
from dsjob.errors import ConfigError, ConfigWarning, Problem, TargetError, UsageError
from dsjob.optim import build_optimizer, build_scheduler
from dsjob.optim.narrow import keep_state_in
from dsjob.optim.onebit.own_gradients import require_data_parallel
from dsjob.optim.parts import updates_elements, updates_parts
from dsjob.optim.schedules import settle_length
from dsjob.parallel import Strategy, build_strategy
from dsjob.parallel.again import name_parameters, refuse_parts
from dsjob.parallel.buffers import cast_buffers
from dsjob.parallel.compare_models import require_same_model
from dsjob.parallel.pipeline.module import PipelineModule
from dsjob.parallel.pipeline.passes import StagePasses
from dsjob.parallel.tensor.divide import divide_model
from dsjob.ranks.divide import divide_axes
from dsjob.ranks.mesh import World, join_world, leave_world
from dsjob.ranks.mpu import divide, read_data_ranks
from dsjob.ranks.rendezvous import init_distributed
from dsjob.terminal import warn
from dsjob.trust.grant import Trust

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[Any], Optimizer]
CreateOptimizer = Callable[[Mapping[str, nn.Parameter]], Optimizer]  # over parameters by name
MakeScheduler = Callable[[Optimizer], LRScheduler]
E = TypeVar("E", bound=Engine)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: LRScheduler | MakeScheduler | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: str | Mapping[str, Any] | None = None,
    trust: Sequence[str] = (),
) -> tuple[Engine, Optimizer | None, Epochs | None, LRScheduler | None]:
    """Builds an engine for `model`. Returns (engine, optimizer, dataloader, lr_scheduler), like `deepspeed.initialize`.

    `config`: a DeepSpeed config: a dict, a `dsjob.config.TrainingConfig` or the path of a JSON file. The default is
    `args.deepspeed_config`. `optimizer` and `lr_scheduler`: objects, or functions of the parameters and of the
    optimizer. The default is those in the config. `model_parameters`: the parameters to optimize, or groups of them; by
    default all trainable ones. `training_data`: a dataset or a loader for the dataloader, which yields this rank's
    micro batches; each iteration over it is one epoch. `mpu`: divides the ranks into data-parallel and model-parallel
    ones (`dsjob.ranks.mpu`). `mesh_param`: (number of ranks, 1). `trust`: prefixes that a `_target_` in the config may
    name, in addition to `dsjob.trust.listed.LISTED` and to modules in the current folder and in the config file's
    folder; `protocol:NAME` allows URLs of checkpoints beyond those of `dsjob.contract.locations`.

    The engine is an `Engine`. `dsjob.deepspeed.initialize` returns one with all of DeepSpeed's getters.

    Raises ConfigError with all problems if the config is invalid. On rank 0, warns (ConfigWarning) about keys without
    effect, and about the values chosen for "auto".
    """
    model = require_model(model)
    given = configs.read_given(args, config if config is not None else config_params, trust)
    with dropping_own_group():
        port = distributed_port if dist_init_required is not False else None
        world = join(mpu, mesh_param, port, model, given.config)
        engine = make_engine(Engine, model, given, world, optimizer, model_parameters, lr_scheduler)
        loader = make_loader(engine, training_data, collate_fn)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def require_model(model: object) -> nn.Module:
    """Returns `model`. Raises UsageError if it is not a torch.nn.Module, or is an engine."""
    if isinstance(model, Engine):
        raise UsageError("initialize got an engine as its model", hint="pass engine.module to train that again")
    if not isinstance(model, nn.Module):
        found = "" if model is None else f", not {name_type(model)}"
        raise UsageError(f"initialize needs a model: a torch.nn.Module{found}", hint="pass model=...")
    return model


@contextmanager
def dropping_own_group() -> Iterator[None]:
    """Leaves a process group of one rank that the block has created, if the block fails.

    A notebook can then call `dsjob.run`, which creates its own group, or `initialize` again. A group of several ranks
    stays: the other ranks may be in a collective.
    """
    before = dist.is_initialized()
    try:
        yield
    except BaseException:
        if not before and dist.is_initialized() and dist.get_world_size() == 1:
            leave_world()
        raise


def join(
    mpu: Any, mesh_param: Sequence[int] | None, port: int | None, model: nn.Module, config: Mapping[str, Any]
) -> World:
    """The ranks of this program, divided by the mpu, by a PipelineModule, or as the config and `mesh_param` say. Joins
    the process group first, using `port`, unless it is None."""
    if port is not None:
        init_distributed(distributed_port=port)
    sizes: dict[str, Any] = {"tensor": read_tensor_size(config), "context": read_context_size(config)}
    if isinstance(model, PipelineModule):
        if mpu is not None:
            raise UsageError(
                "initialize got an mpu for a PipelineModule, whose topology divides the ranks", hint="omit mpu"
            )
        return model.divide()
    if mesh_param:
        sizes["context"] = _read_mesh(mesh_param, sizes["context"], sizes["tensor"], mpu)
    if max(sizes.values()) == 1:
        return divide(join_world(), mpu)
    world = divide_axes(join_world(), **sizes)
    if mpu is not None and read_data_ranks(mpu) != (world.data_rank, world.data_size):
        named = "tensor_parallel" if sizes["tensor"] > 1 else "sequence parallelism"
        raise UsageError(
            f"initialize got an mpu, and {named} divides the ranks in another way: this rank is data-parallel rank"
            f" {world.data_rank} of {world.data_size}",
            hint="omit one of them",
        )
    return world


def _read_mesh(mesh_param: Sequence[int], context: int, tensor: int, mpu: Any) -> int:
    """The second number of (data-parallel ranks, ranks that divide sequences). Raises UsageError."""
    ranks = join_world().everyone.size // tensor
    found = tuple(mesh_param)
    if mpu is not None and len(found) == 2:
        return int(found[1])
    if len(found) != 2 or found[0] * found[1] != ranks or context not in (1, found[1]):
        raise UsageError(
            f"mesh_param={mesh_param!r} does not describe {ranks} ranks",
            hint=f"pass (data-parallel ranks, ranks that divide sequences), for example ({ranks}, 1)",
        )
    return int(found[1])


def make_engine(
    kind: type[E],
    model: nn.Module,
    given: configs.Given,
    world: World,
    optimizer: Optimizer | MakeOptimizer | None,
    model_parameters: Parameters | None,
    lr_scheduler: LRScheduler | MakeScheduler | None,
) -> E:
    """Builds an engine of class `kind`. Rank 0 warns about keys in the config that have no effect."""
    spec, told = resolve_config(given.config, world_size=world.data_size, locate=given.origin.locate)
    if world.everyone.rank == 0:
        idle = [] if kind._reports else configs.find_reports(given.config)
        replaced = configs.find_replaced(given, {"optimizer": optimizer, "scheduler": lr_scheduler})
        configs.warn([*told, *idle, *replaced], given.origin)
    with _hinting_at_trust():
        return build_engine(
            model,
            spec,
            world,
            kind=kind,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            trust=given.trust,
            config=complete_config(given.config, spec),
        )


def make_loader(
    engine: Engine, data: Any, collate: Callable[[list[Any]], Any] | None, *, shuffle: bool = True
) -> Epochs | None:
    """A loader for `data`; None if the program gave none, or this rank reads no data."""
    if data is None or not engine.world.loads:
        # With an mpu, ranks that read no data have returned above. A collective would wait for them.
        return None
    loader = load_batches(engine, data, shuffle=shuffle, collate=collate, pin_memory=False)
    if engine.world.model.size == 1:
        require_same_length(loader.samples_per_epoch, engine.world, "training_data")
    return loader


@contextmanager
def _hinting_at_trust() -> Iterator[None]:
    """Replaces the command-line flag --trust in hints by the argument of `initialize`."""
    try:
        yield
    except TargetError as error:
        hint = re.sub(r"run with --trust (\S+)", r'call initialize with trust=["\1"]', error.hint)
        raise TargetError(error.message, hint=hint) from error


def build_engine(
    model: nn.Module,
    spec: EngineSpec,
    world: World,
    *,
    kind: type[E],
    optimizer: Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    lr_scheduler: LRScheduler | MakeScheduler | None = None,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
    config: Mapping[str, Any] | None = None,
    create: CreateOptimizer | None = None,
    pipeline: StagePasses | None = None,
) -> E:
    """Builds an engine of class `kind` from `spec`: spreads the model, then builds the optimizer and the schedule.

    pipeline: runs the passes, if `model` is only a stage of a model, whose blocks are prepared already.
    create: builds the optimizer over the masters by name, instead of `spec.optimizer`.
    config: the whole DeepSpeed config, for keys that are not in `spec`.
    """
    # The order matters: sharding replaces parameters, so everything that refers to the original ones is stored by name
    # first. The optimizer is built over the masters, which exist only after sharding.
    precision = Precision.of(spec, world.device)
    refuse_parts(model, world)
    names = name_parameters(model)
    # By name: after sharding, the ids of these parameters mean nothing.
    groups = _name_groups(model_parameters, names)
    checkpointing.use_ranks(world)
    _mark_leaves(model, spec, world)
    choose_layers(model, spec.ops.transformer, world)
    strategy = _spread(model, spec, world, precision, pipeline)
    masters = strategy.masters
    over = list(masters.values()) if groups is None else _find_groups(groups, masters)
    built = None
    # In order of precedence: an object, a function, the config.
    if isinstance(optimizer, Optimizer):
        built = _move_optimizer(optimizer, names, masters)
    elif optimizer is not None:
        _require_function(optimizer)
        built = optimizer(over)
    elif create is not None and spec.optimizer is not None:
        built = create(masters)
    elif spec.optimizer is not None:
        # The masters are new objects under FSDP2 and with offloading, so `names` does not know their ids.
        called = {id(master): name for name, master in masters.items()}
        built = build_optimizer(spec.optimizer, over, trust, called)
    _prepare_optimizer(built, strategy, spec, precision)
    scheduler = _make_scheduler(lr_scheduler, spec, built, trust)
    return kind(
        strategy,
        spec=spec,
        world=strategy.world,
        precision=precision,
        optimizer=built,
        lr_scheduler=scheduler,
        config=config,
    )


def _prepare_optimizer(built: Optimizer | None, strategy: Strategy, spec: EngineSpec, precision: Precision) -> None:
    """Chooses native ops for the optimizer. Raises UsageError if it does not suit how the model is spread."""
    require_data_parallel(built, strategy.world)
    if built is None:
        return
    if strategy.disk is not None:
        strategy.disk.require(built)
    if strategy.splits and not updates_parts(built):
        raise UsageError(
            f"tensor_parallel: {type(built).__name__} would see only this rank's parts of parameters",
            hint="use AdamW, Lamb or Muon; if it updates each element on its own, give its class updates_parts = True",
        )
    choose_ops(built, strategy.masters.values(), spec.ops, strategy.world)
    if precision.master != torch.float32:
        if not updates_elements(built):
            raise UsageError(
                f"bf16.bf16_master_weights_and_grads: {type(built).__name__} would see only this rank's parts of"
                " parameters",
                hint="use AdamW; if it updates each element on its own, give its class updates_parts = True",
            )
        keep_state_in(built, precision.state)


def _spread(
    model: nn.Module, spec: EngineSpec, world: World, precision: Precision, pipeline: StagePasses | None
) -> Strategy:
    require_same_model(model, world)
    divided = divide_model(model, spec.tensor_parallel, world)
    cast_buffers(model, spec.data_types, precision.compute)
    # Before sharding: FSDP2's hooks then lie outside the recomputed and compiled forwards.
    if pipeline is None:
        prepare_blocks(model, spec)
    if isinstance(model, PipelineModule):
        if spec.pipeline.activation_checkpoint_interval:
            model.set_checkpoint_interval(spec.pipeline.activation_checkpoint_interval)
        pipeline = StagePasses(model.stage, world, model.schedule)
    stages = pipeline.world.pipe.size if pipeline is not None else 1
    asked: Any = spec.pipeline.stages
    if asked not in ("auto", stages):
        raise UsageError(
            f"pipeline.stages is {asked}, but the model has {stages}",
            hint="pass a PipelineModule with this number of stages, or run a job document",
        )
    zero = spec.zero_optimization
    return build_strategy(
        model, zero=zero, world=world, precision=precision, aio=spec.aio, pipeline=pipeline, divided=divided
    )


def _mark_leaves(model: nn.Module, spec: EngineSpec, world: World) -> None:
    missing = mark_leaves(model, spec.zero_optimization.leaf_module)
    if missing and world.everyone.rank == 0:
        message = f"zero_optimization.leaf_module names modules that the model does not have: {', '.join(missing)}"
        warn(message, ConfigWarning, stacklevel=4)


def _require_function(optimizer: object) -> None:
    if not callable(optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer or a function, not of type {type(optimizer).__name__}",
            hint='to choose one by its name, write "optimizer": {"type": NAME} in the config',
        )


def _make_scheduler(
    given: LRScheduler | MakeScheduler | None, spec: EngineSpec, built: Optimizer | None, trust: Trust
) -> LRScheduler | None:
    if callable(given) and not hasattr(given, "step"):
        if built is None:
            raise UsageError("lr_scheduler needs an optimizer: pass one, or name one in the config")
        return given(built)
    if given is not None:
        return given  # type: ignore[return-value]
    if spec.scheduler is not None and built is not None:
        return build_scheduler(settle_length(spec.scheduler, spec.trainer.max_steps), built, trust)
    return None


def _name_groups(parameters: Parameters | None, names: Mapping[int, str]) -> list[dict[str, Any]] | None:
    """Parameter groups with names in place of parameters, because sharding replaces the parameters."""
    if parameters is None:
        return None
    groups: list[Any] = [parameters] if isinstance(parameters, dict) else list(parameters)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    named = []
    for group in groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise UsageError("model_parameters contains a tensor that is not a parameter of the model")
        named.append({**group, "params": [names[id(p)] for p in group["params"] if p.requires_grad]})
    return [group for group in named if group["params"]]


def _find_groups(groups: list[dict[str, Any]], masters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [{**group, "params": [masters[name] for name in group["params"]]} for group in groups]


def _move_optimizer(optimizer: Optimizer, names: Mapping[int, str], masters: Mapping[str, nn.Parameter]) -> Optimizer:
    """Makes the user's optimizer, which was built over the model before sharding, refer to the masters."""
    if optimizer.state:
        raise UsageError("the optimizer has already taken steps", hint="pass a new one, or a function that builds it")
    for group in optimizer.param_groups:
        if any(id(p) not in names for p in group["params"]):
            raise UsageError("the optimizer contains a tensor that is not a parameter of the model")
        # In place: the program, and schedules that it has built, hold this very optimizer.
        group["params"] = [masters[names[id(p)]] for p in group["params"] if names[id(p)] in masters]
    return optimizer


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config`, like `deepspeed.add_config_arguments`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use the engine (for programs that check this flag)")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="DeepSpeed config, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)  # its name before it was released
    group.add_argument("--deepscale_config", default=None, help=argparse.SUPPRESS)
    return parser


__all__ = ["ConfigError", "Problem", "add_config_arguments", "build_engine", "init_distributed", "initialize"]
