"""What one micro batch does: forward, backward and step of one engine, or a function of the user's over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.contract import LossFunction, call_model, find_loss
from dsjob.engines import Engines
from dsjob.errors import ContractError
from dsjob.mesh import World
from dsjob.progress import RECORD_KEYS

UserStep = Callable[[Engines, Any], Any]
MicroStep = Callable[[Engines, Any], dict[str, Tensor]]


def make_micro_step(own: UserStep | None, loss: LossFunction | None) -> MicroStep:
    """A function that trains on a batch and gives detached scalars by name, `loss` first, the others sorted."""
    if own is None:
        return lambda engines, batch: _train_one(engines, batch, loss)
    return lambda engines, batch: _call_own(own, engines, batch)


def _train_one(engines: Engines, batch: Any, loss: LossFunction | None) -> dict[str, Tensor]:
    engine = engines.first
    found = find_loss(call_model(engine, batch), batch, loss)
    engine.backward(found)
    engine.step()
    return {"loss": found.detach()}


def _call_own(step: UserStep, engines: Engines, batch: Any) -> dict[str, Tensor]:
    given = step(engines, batch)
    if not engines.first.world.reports:
        return {}
    scalars = read_scalars(given, "trainer.step")
    taken = scalars.keys() & (RECORD_KEYS - {"loss"})
    if taken:
        raise ContractError(
            f"trainer.step returned {min(taken)!r}, which a log record has by itself", hint="give it another name"
        )
    first = "loss" if "loss" in scalars else next(iter(scalars))
    return {"loss": scalars.pop(first), **{name: scalars[name] for name in sorted(scalars)}}


def read_scalars(values: Any, what: str) -> dict[str, Tensor]:
    """What a step function returned, as detached scalars by name. Raises ContractError where it is something else."""
    named = values if isinstance(values, Mapping) else {"loss": values}
    scalars = {str(name): scalar for name, value in named.items() if (scalar := to_scalar(value)) is not None}
    if not named or len(scalars) < len(named):
        kinds = {n: f"{type(v).__name__}{list(v.shape) if isinstance(v, Tensor) else ''}" for n, v in named.items()}
        raise ContractError(
            f"{what} returned {', '.join(f'{name}: {kind}' for name, kind in kinds.items()) or 'nothing'}",
            hint="return the loss, a tensor of one element, or a dict of such tensors by name",
        )
    return scalars


def to_scalar(value: Any) -> Tensor | None:
    """A number, or a tensor of one element, as a detached 0-dim tensor; None of anything else."""
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # what torch raises of a string, a ragged list, None
        return None
    return tensor.reshape(()) if tensor.numel() == 1 else None


class Names:
    """The names of the scalars that a step function gives: the same in every call, on every rank that reports."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._known: list[str] | None = None

    def require(self, scalars: dict[str, Tensor], world: World) -> dict[str, Tensor]:
        """`scalars`, whose names are those of before; zeros where this rank reports nothing.

        Raises ContractError for other names. The first call is a collective.
        """
        if self._known is None:
            self._known = self._agree(list(scalars) if world.reports else None, world.everyone.world_size)
        if not world.reports:
            return dict.fromkeys(self._known, torch.zeros(()))
        if self._known != list(scalars):
            raise ContractError(
                f"{self._what} returned {', '.join(scalars)}, and {', '.join(self._known)} before",
                hint="return the same names in every call",
            )
        return scalars

    def _agree(self, names: list[str] | None, world_size: int) -> list[str]:
        ranks: list[Any] = [names] * world_size
        if world_size > 1:
            dist.all_gather_object(ranks, names)
        (first, known), *others = ((rank, found) for rank, found in enumerate(ranks) if found is not None)
        for rank, found in others:
            if found != known:
                raise ContractError(
                    f"{self._what} returned {', '.join(known)} on rank {first}, and {', '.join(found)} on rank {rank}",
                    hint="return the same names everywhere",
                )
        return list(known)
