"""What one micro batch does: forward, backward and step of one engine, or a function of the user's over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dsjob.contract import LossFunction, call_model, find_loss
from dsjob.engines import Engines
from dsjob.errors import ContractError

UserStep = Callable[[Engines, Any], Any]
MicroStep = Callable[[Engines, Any], dict[str, Tensor]]


def make_micro_step(own: UserStep | None, loss: LossFunction | None) -> MicroStep:
    """A function that trains on a batch and gives detached scalars by name, `loss` first among them."""
    if own is None:
        return lambda engines, batch: _train_one(engines, batch, loss)
    return lambda engines, batch: _put_loss_first(read_scalars(own(engines, batch), "trainer.step"))


def _train_one(engines: Engines, batch: Any, loss: LossFunction | None) -> dict[str, Tensor]:
    engine = engines.first
    found = find_loss(call_model(engine, batch), batch, loss)
    engine.backward(found)
    engine.step()
    return {"loss": found.detach()}


def _put_loss_first(scalars: dict[str, Tensor]) -> dict[str, Tensor]:
    if "loss" in scalars:
        return {"loss": scalars.pop("loss"), **scalars}
    return {"loss": next(iter(scalars.values())), **scalars}


def read_scalars(values: Any, what: str) -> dict[str, Tensor]:
    """What a step function returned, as detached scalars by name. Raises ContractError where it is something else."""
    named = values if isinstance(values, Mapping) else {"loss": values}
    scalars = {str(name): value.detach() for name, value in named.items() if isinstance(value, Tensor)}
    if not named or len(scalars) < len(named) or any(value.numel() != 1 for value in scalars.values()):
        shown = {
            name: f"{type(v).__name__}{list(v.shape) if isinstance(v, Tensor) else ''}" for name, v in named.items()
        }
        raise ContractError(
            f"{what} returned {', '.join(f'{name}: {kind}' for name, kind in shown.items()) or 'nothing'}",
            hint="return the loss, a tensor of one element, or a dict of such tensors by name",
        )
    return {name: value.reshape(()) for name, value in scalars.items()}
