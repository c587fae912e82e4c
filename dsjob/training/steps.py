"""The work on one micro batch: forward, backward and step of one engine, or the user's own step over several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dsjob.compute.calls import to_scalar
from dsjob.data.batches import count_samples
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.training.averaging import Part
from dsjob.training.display import RECORD_KEYS
from dsjob.training.metrics import Measures
from dsjob.training.objective import Objective
from dsjob.training.vocabulary import LossOfVocabulary

UserStep = Callable[[Engines, Any], Any]
MicroStep = Callable[[Engines, Any, Part], dict[str, Tensor]]
Method = Callable[[Engine, Any, Part], tuple[Any, Mapping[str, Tensor]]]  # see Trainer.run_training_step


def make_micro_step(
    own: UserStep | None,
    objective: Objective,
    measures: Measures | None = None,
    taken: Collection[str] = (),
    method: Method | None = None,
    vocabulary: LossOfVocabulary | None = None,
) -> MicroStep:
    """A function that trains on a batch and returns detached scalars by name, `loss` first.

    own: the user's step, instead of the forward pass and loss of `objective`. measures: training metrics, which are fed
    each batch. taken: names in the result of `own` that only metrics use. method: a Trainer's training_step, if a
    subclass has replaced it. vocabulary: computes the model's loss without logits.
    """
    if method is not None:
        return lambda engines, batch, part: _call_method(method, engines, batch, part)
    if own is None:
        return lambda engines, batch, part: _train_one(engines, batch, part, objective, measures, vocabulary)
    return lambda engines, batch, part: _call_own(own, engines, batch, measures, taken)


def _train_one(
    engines: Engines,
    batch: Any,
    part: Part,
    objective: Objective,
    measures: Measures | None,
    vocabulary: LossOfVocabulary | None,
) -> dict[str, Tensor]:
    engine = engines.first
    with vocabulary.deferring() if vocabulary else nullcontext():
        outputs, found = objective.compute(engine, batch)
    # []: each the mean over the micro batch times its share of the step's targets, so that `backward` can divide by the
    # number of micro batches as usual.
    weighed = part.weigh(found)
    loss = objective.add(weighed)
    engine.backward(loss)
    if measures:
        mean = objective.add([each.mean for each in found])
        measures.feed(outputs, batch, mean, count_samples(batch), objective)
    _step(engine, part)
    return {"loss": loss.detach(), **{name: each.detach() for name, each in objective.name(weighed).items()}}


def _step(engine: Engine, part: Part) -> None:
    if engine.is_gradient_accumulation_boundary():  # all gradients of the step are there, but not reduced yet
        part.step.settle(engine)
    engine.step()


def _call_method(method: Method, engines: Engines, batch: Any, part: Part) -> dict[str, Tensor]:
    engine = engines.first
    given, named = method(engine, batch, part)
    scalars = _name_loss(read_scalars(given, "training_step"), "training_step")
    _step(engine, part)
    return {**scalars, **named}


def _call_own(
    step: UserStep, engines: Engines, batch: Any, measures: Measures | None, taken: Collection[str]
) -> dict[str, Tensor]:
    given = step(engines, batch)
    # With an mpu, some ranks have no loss to report.
    if not engines.first.world.reports:
        return {}
    scalars = read_scalars(given, "trainer.step", taken)
    if measures:
        measures.feed(given, batch, None, count_samples(batch))
    return _name_loss(scalars, "trainer.step")


def _name_loss(scalars: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The scalars of a step of the user's with the loss first, under this name. Raises ContractError."""
    reserved = scalars.keys() & (RECORD_KEYS - {"loss"})
    if reserved:
        raise ContractError(f"{what} returned {min(reserved)!r}, a reserved log name", hint="give it another name")
    first = "loss" if "loss" in scalars else next(iter(scalars))
    return {"loss": scalars.pop(first), **{name: scalars[name] for name in sorted(scalars)}}


def read_scalars(values: Any, what: str, taken: Collection[str] = ()) -> dict[str, Tensor]:
    """The result of a step function, as detached scalars by name. Raises ContractError for anything but scalars.

    taken: names that metrics use; their values may be anything.
    """
    named = values if isinstance(values, Mapping) else {"loss": values}
    named = {name: value for name, value in named.items() if name not in taken}
    scalars = {str(name): scalar for name, value in named.items() if (scalar := to_scalar(value)) is not None}
    if not named or len(scalars) < len(named):
        kinds = {n: f"{type(v).__name__}{list(v.shape) if isinstance(v, Tensor) else ''}" for n, v in named.items()}
        raise ContractError(
            f"{what} returned {', '.join(f'{name}: {kind}' for name, kind in kinds.items()) or 'nothing'}",
            hint="return the loss, a tensor of one element, or a dict of such tensors by name",
        )
    return scalars


class Names:
    """Checks that a step function returns the same names in every call, on every rank that reports."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._known: list[str] | None = None

    def require(self, scalars: dict[str, Tensor], world: World) -> dict[str, Tensor]:
        """`scalars`, after checking their names; zeros if this rank reports nothing.

        Raises ContractError if the names differ from the first call. The first call is a collective.
        """
        # Only the first call communicates. Later ones compare with its result.
        if self._known is None:
            self._known = self._agree(all_gather(world.everyone, list(scalars) if world.reports else None))
        if not world.reports:
            return dict.fromkeys(self._known, torch.zeros(()))
        if self._known != list(scalars):
            raise ContractError(
                f"{self._what} returned {', '.join(scalars)}, but {', '.join(self._known)} in an earlier call",
                hint="return the same names in every call",
            )
        return scalars

    def _agree(self, ranks: list[list[str] | None]) -> list[str]:
        (first, known), *others = ((rank, found) for rank, found in enumerate(ranks) if found is not None)
        for rank, found in others:
            if found != known:
                raise ContractError(
                    f"{self._what} returned {', '.join(known)} on rank {first}, but {', '.join(found)} on rank {rank}",
                    hint="return the same names on every rank",
                )
        return list(known)
