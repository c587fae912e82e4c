"""`deepspeed.initialize`: like `dsjob.initialize`, but returns an engine with all of DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.data import Epochs
from dsjob.deepspeed.runtime.engine import DeepSpeedEngine
from dsjob.engine import build

engine_type = DeepSpeedEngine  # what `initialize` makes; `dsjob exec` puts one here that records its steps


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
    given = build.read_given(args, config if config is not None else config_params, trust)
    world = build.join(mpu, mesh_param, distributed_port if dist_init_required is not False else None)
    engine = build.make_engine(engine_type, model, given, world, optimizer, model_parameters, lr_scheduler)
    engine.mpu, engine.client_lr_scheduler = mpu, lr_scheduler
    engine.training_dataloader = build.make_loader(engine, training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
