"""Takes optimizer steps in parts, so that finished parts can be processed while the next one steps.

With offloading, an optimizer that updates each parameter independently steps 64 MiB of masters at a time. Meanwhile,
the new weights of the previous part are cast on the host and copied to the device. Other optimizers, and those with
hooks, step everything at once.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsjob.errors import UsageError
from dsjob.optim.lion import Lion
from dsjob.optim.partwise import PartwiseOptimizer
from dsjob.optim.shards import local
from dsjob.optim.whole import needs_whole, step_whole
from dsjob.torch_private import collecting, has_step_hooks

T = TypeVar("T")
_OF_DTENSOR = os.path.join("torch", "distributed", "tensor", "")

# A step of these updates each parameter with a gradient independently, and does nothing else.
_SEPARATE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    Lion,
)
# Those that collect tensors in lists and only change these in place.
_COLLECTING = tuple(kind for kind in _SEPARATE if kind not in (torch.optim.SGD, Lion))


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Whether steps over subsets of the parameters are equivalent to one step over all, also for user code."""
    return is_plain(optimizer) and isinstance(optimizer, _SEPARATE)


def updates_parts(optimizer: Optimizer) -> bool:
    """Whether a step over parts of parameters gives the parts of a step over whole ones: each element depends on itself
    alone, or the optimizer knows how parameters are divided (`ranks.splits`). Other classes can say so with an
    attribute `updates_parts = True`."""
    return isinstance(optimizer, (*_SEPARATE, PartwiseOptimizer)) or getattr(optimizer, "updates_parts", False) is True


def updates_elements(optimizer: Optimizer) -> bool:
    """Whether each element depends on itself alone, so that a step over any parts of parameters may stand for one over
    the parameters."""
    return isinstance(optimizer, _SEPARATE) or getattr(type(optimizer), "updates_parts", False) is True


def is_plain(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` runs no code but torch's and dsjob's."""
    kind = type(optimizer)
    own = kind.__module__.split(".")[0] in ("torch", "dsjob")  # a user's subclass may do more in `step`
    # So may a `step` that replaces the method on this instance; but a schedule's wrapper only counts calls.
    step = vars(optimizer).get("step")
    return own and (step is None or getattr(step, "__wrapped__", None) is kind.step) and not has_step_hooks(optimizer)


def step_own_parts(optimizer: Optimizer) -> None:
    """Steps `optimizer` over this rank's parts of sharded parameters, as plain tensors where that gives the same bits.

    A step of torch's optimizers calls several operators for each parameter. On DTensors, each call first works out how
    its result is sharded, which takes longer than updating a small parameter.
    """
    if needs_whole(optimizer):
        step_whole(optimizer)
    elif is_plain(optimizer) and isinstance(optimizer, _COLLECTING):
        with collecting(optimizer, local):
            optimizer.step()
    else:
        with _explaining(optimizer):
            optimizer.step()


@contextmanager
def _explaining(optimizer: Optimizer) -> Iterator[None]:
    """Turns an error of DTensor into one that says what the optimizer cannot do."""
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "DTensor" in str(error) or any(_OF_DTENSOR in frame.filename for frame in frames):
            kind, first = type(optimizer), (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{kind.__module__}.{kind.__qualname__} cannot step sharded parameters: {first}",
                hint="use zero_optimization.stage=0, or an optimizer that steps each element by itself, such as AdamW",
            ) from error
        raise


def split(items: Sequence[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Splits `items` into lists whose sizes add up to at most `limit`. A larger item is alone in its list."""
    part: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if part and total + own > limit:
            yield part
            part, total = [], 0
        part.append(item)
        total += own
    if part:
        yield part


def step_in_parts(
    optimizer: Optimizer,
    parts: Sequence[Sequence[Tensor]],
    step: Callable[[Optimizer], object],
    done: Callable[[int], None],
) -> None:
    """Steps `parts` of the parameters one after another with `step`.

    Parameters that are in no part step with the first. Calls `done` with a part's number after its step. Sets gradients
    to None.
    """
    # An optimizer skips parameters without a gradient, so hide those of the parts that are not due yet.
    gradients = [[parameter.grad for parameter in part] for part in parts]
    # After this, only parameters that are in no part still have a gradient; the first step below includes them.
    for part in parts:
        for parameter in part:
            parameter.grad = None
    for number, part in enumerate(parts):
        for parameter, gradient in zip(part, gradients[number], strict=True):
            parameter.grad = gradient
        step(optimizer)
        optimizer.zero_grad()
        done(number)
