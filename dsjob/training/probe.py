"""Measures what a plan needs to know about a job: model shapes, optimizer state, learning rates and data.

Nothing is trained, and no model is materialized. `dsjob.training.activations` measures a forward pass, and
`dsjob.planning` does the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsjob.compute.find_blocks import find_blocks
from dsjob.contract.spec import JobSpec, Method, Target, make_target
from dsjob.data import Loader
from dsjob.errors import DsjobError, TargetError, UsageError
from dsjob.optim import build_optimizer, build_scheduler
from dsjob.optim.closed_form import ClosedForm
from dsjob.optim.schedules import settle_length
from dsjob.planning.model import COMPRESSING, Model, OptimizerState, Weight
from dsjob.ranks.mesh import World
from dsjob.training.build import build_model
from dsjob.training.loaders import build_collate, build_training_data
from dsjob.trust.frames import find_path
from dsjob.trust.grant import Trust
from dsjob.trust.targets import call_target, find_target

_CONFIG = "transformers.AutoConfig.from_pretrained"
MOST_STEPS = 200_000  # the limit for schedules that can only be traced step by step


def build_on_meta(
    target: Target,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
    *,
    downloads: bool = False,
) -> nn.Module:
    """Builds the model on the meta device: shapes without memory. downloads: whether a configuration may come from the
    hub. Raises UsageError if it needs real tensors."""
    if target.path.endswith(".from_pretrained"):
        return _build_from_config(target, trust, downloads)
    try:
        with torch.device("meta"):
            return build_model(target, trust)
    except DsjobError:
        raise
    except Exception as error:
        failed = UsageError(
            f"{target.path} cannot be built on torch's meta device, without memory: {type(error).__name__}: {error}",
            hint="pass the number of parameters instead of the model: --params 7B",
        )
        failed.put_at(find_path(error))
        raise failed from error


def _build_from_config(target: Target, trust: Trust, downloads: bool) -> nn.Module:
    """Builds the model of a `from_pretrained` call from its configuration only, read from a local folder or the hub's
    cache, or with `downloads` from the hub."""
    where = ("model",)
    # Checking the arguments reads the model's files too, and would otherwise fetch them.
    offline = {**target.arguments, **({} if downloads else {"local_files_only": True})}
    call_target(Target(target.path, {"_partial_": True, **offline}), trust=trust, where=where)
    owner: Any = getattr(find_target(target.path, trust), "__self__", None)
    given = {key: value for key, value in offline.items() if key != "config"}
    name = given.get("pretrained_model_name_or_path") or next(iter(given.get("_args_") or []), "")
    try:
        config = target.arguments.get("config") or {"_target_": _CONFIG, **given}
        of_config = (*where, "config") if target.arguments.get("config") else where
        built = (
            call_target(make_target(config), trust=trust, where=of_config) if isinstance(config, Mapping) else config
        )
        with torch.device("meta"):
            model = owner.from_config(built) if hasattr(owner, "from_config") else owner(built)
    except DsjobError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, OSError) and not os.path.isdir(str(name)):
            failed = UsageError(
                f"model: {name} is neither a folder nor in this machine's cache, and a plan downloads nothing",
                hint=f"run hf download {name} config.json{_name_revision(given)}, or pass --params 7B instead",
            )
        else:
            failed = UsageError(
                f"model: {target.path} cannot be built from the configuration of {name}: {reason[:300]}",
                hint="pass the number of parameters instead of the model: --params 7B",
            )
        failed.put_at((*where, "_target_"))
        raise failed from error
    if not isinstance(model, nn.Module):
        failed = UsageError(f"model: {target.path} returned a {type(model).__name__}, not a torch.nn.Module")
        failed.put_at((*where, "_target_"))
        raise failed
    return model


def _name_revision(arguments: Mapping[str, Any]) -> str:
    return f" --revision {arguments['revision']}" if isinstance(arguments.get("revision"), str) else ""


def size_model(model: nn.Module) -> Model:
    """The parameters of a model, each with the number of the block that it is sharded in (0: the rest of the model),
    and the bytes of its buffers."""
    blocks = {id(p): number for number, block in enumerate(find_blocks(model), 1) for p in block.parameters()}
    weights = tuple(
        Weight(tuple(p.shape), p.itemsize, p.requires_grad, blocks.get(id(p), 0)) for p in model.parameters()
    )
    return Model(weights, buffers=sum(buffer.nbytes for buffer in model.buffers()))


def load_data(spec: JobSpec, world_size: int, trust: Trust = Trust()) -> Loader:  # noqa: B008 (frozen)
    """The training data of rank 0. Raises DataError if it is missing or empty."""
    world = World(data_rank=0, local_rank=0, data_size=world_size, device=torch.device("cpu"))
    return build_training_data(spec, world, build_collate(spec, trust), trust)


def probe_optimizer(method: Method, trust: Trust = Trust()) -> OptimizerState:  # noqa: B008 (frozen)
    """Measures the optimizer state per parameter by taking one step on a tiny parameter.

    Raises TargetError if the step fails.
    """
    if (method.type or "").lower() in COMPRESSING:  # these allocate more state after the freeze, so one step misses it
        return COMPRESSING[(method.type or "").lower()]
    parameter = nn.Parameter(torch.ones(7, 5))
    optimizer = build_optimizer(method, [parameter], trust)
    parameter.grad = torch.ones(7, 5)
    try:
        optimizer.step()
    except Exception as error:
        failed = TargetError(f"optimizer {method.label}: its first step failed: {type(error).__name__}: {error}")
        failed.put_at(("optimizer", "_target_" if method.target else "type"))
        raise failed from error
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    # [7, 5] occurs as no other shape, so a tensor of that shape is a copy that grows with the parameter.
    alike = [tensor for tensor in kept if tensor.shape == parameter.shape]
    return OptimizerState(
        copies=sum(tensor.itemsize for tensor in alike) / parameter.itemsize,
        per_parameter=sum(tensor.nbytes for tensor in kept if tensor.shape != parameter.shape),
    )


def trace_rates(
    spec: JobSpec,
    steps: int,
    points: int,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
) -> list[tuple[int, float]]:
    """The learning rate of the first group at about `points` steps from the first to the last, from the real schedule.

    Empty if the rates depend on losses, or if the schedule can only be traced step by step and the run is too long.
    """
    if spec.optimizer is None or steps < 1:
        return []
    optimizer = build_optimizer(spec.optimizer, [nn.Parameter(torch.zeros(1))], trust)
    wanted = sorted({round(i * (steps - 1) / max(points - 1, 1)) for i in range(points)})
    if spec.scheduler is None:
        return [(step, float(optimizer.param_groups[0]["lr"])) for step in wanted]
    scheduler = build_scheduler(settle_length(spec.scheduler, steps), optimizer, trust)
    jumps = isinstance(scheduler, ClosedForm)
    if isinstance(scheduler, ReduceLROnPlateau) or (steps > MOST_STEPS and not jumps):
        return []
    optimizer.step()  # without gradients; only prevents torch's warning about scheduler.step() before optimizer.step()
    rates, now = [], 0
    for step in wanted:
        if jumps:
            scheduler.load_state_dict({"last_epoch": step})
        for _ in range(0 if jumps else step - now):
            scheduler.step()
        now = step
        rates.append((step, float(optimizer.param_groups[0]["lr"])))
    return rates
