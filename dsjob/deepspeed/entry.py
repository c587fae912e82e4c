"""`deepspeed.initialize`: like `dsjob.initialize`, but returns an engine with all of DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.contract import schema
from dsjob.data import Epochs
from dsjob.deepspeed.program_monitors import require_packages
from dsjob.deepspeed.runtime.config import take_own
from dsjob.deepspeed.runtime.engine import DeepSpeedEngine
from dsjob.deepspeed.runtime.pipe.engine import PipelineEngine
from dsjob.deepspeed.tensor_model import add_tensor_size, count_data_ranks
from dsjob.engine import build, configs
from dsjob.errors import ConfigWarning
from dsjob.parallel.pipeline.module import PipelineModule
from dsjob.ranks.agreement import on_rank_0
from dsjob.terminal import warn

# What `initialize` makes, and for a PipelineModule; `dsjob exec` puts engines here that record their steps.
engine_type: type[DeepSpeedEngine] = DeepSpeedEngine
pipeline_type: type[DeepSpeedEngine] = PipelineEngine


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | build.MakeOptimizer | None = None,
    model_parameters: build.Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: LRScheduler | build.MakeScheduler | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: str | Mapping[str, Any] | None = None,
    trust: Sequence[str] = (),
) -> tuple[DeepSpeedEngine, Optimizer | None, Epochs | None, LRScheduler | None]:
    """Like `dsjob.initialize`, with the same arguments and errors, but returns a `DeepSpeedEngine`."""
    model = build.require_model(model)
    config = config if config is not None else config_params
    dotted = _find_dotted(config)
    if isinstance(config, Mapping) and dotted:
        config = {key: value for key, value in config.items() if key not in dotted}
    given = add_tensor_size(model, configs.read_given(args, config, trust))
    with build.dropping_own_group():
        port = distributed_port if dist_init_required is not False else None
        world = build.join(mpu, mesh_param, port, model, given.config)
        given = count_data_ranks(given, world)
        left, own = take_own(given.config, world.data_size)
        given = replace(given, config=left)
        on_rank_0(world.everyone, lambda: require_packages(given))
        if dotted and world.everyone.rank == 0:
            listed = f"these keys have no effect, as in DeepSpeed; write them as section and key: {', '.join(dotted)}"
            warn(listed, ConfigWarning, stacklevel=2)
        kind = pipeline_type if isinstance(model, PipelineModule) else engine_type
        engine = build.make_engine(kind, model, given, world, optimizer, model_parameters, lr_scheduler)
        engine.obey(own)
        engine.mpu, engine.client_lr_scheduler = mpu, lr_scheduler
        # DeepSpeed's pipelines read their data in order.
        shuffle = not isinstance(model, PipelineModule)
        engine.training_dataloader = build.make_loader(engine, training_data, collate_fn, shuffle=shuffle)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _find_dotted(config: object) -> list[str]:
    """The keys of a config that join a section and a key by a dot, such as `zero_optimization.reduce_bucket_size`.

    TRL adds such keys to the config of a reference model, so they are no errors; DeepSpeed ignores them.
    """
    sections = schema.deepspeed_schema()["properties"]
    pairs = [(key, *key.split(".", 1)) for key in config if "." in str(key)] if isinstance(config, Mapping) else []
    return [key for key, section, name in pairs if name in sections.get(section, {}).get("properties", {})]
