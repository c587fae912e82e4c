"""Steps optimizers whose update of a parameter depends on all of it, and which know nothing of shards: Adafactor.

Every rank gathers some parameters and gradients, takes the same step with the whole tensors, and keeps its own part. So
the result is that of one rank. State with the shape of the parameter is sharded between steps, and gathered like it;
the rest, such as Adafactor's means of rows and columns, is small and stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dsjob.optim.shards import local, own_part, whole

PART = 64 << 20  # bytes of whole parameters that are stepped together
_KINDS = {("torch.optim", "Adafactor"), ("transformers.optimization", "Adafactor")}


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether `optimizer` has sharded parameters, but needs whole ones."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(optimizer).__mro__}
    names = {(module.removesuffix("._adafactor"), name) for module, name in kinds}
    return bool(names & _KINDS) and any(isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"])


@torch.no_grad()
def step_whole(optimizer: Optimizer) -> None:
    """Steps `optimizer`, some parameters at a time. A collective: all ranks must have the same gradients."""
    with _hidden_gradients(optimizer) as gradients:
        for part in _split(gradients):
            with _stand_ins(optimizer, {parameter: gradients[parameter] for parameter in part}):
                optimizer.step()


@contextmanager
def _hidden_gradients(optimizer: Optimizer) -> Iterator[dict[Tensor, Tensor]]:
    """Takes all gradients away, because an optimizer skips parameters without one, and puts them back at the end."""
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {parameter: parameter.grad for parameter in listed if parameter.grad is not None}
    for parameter in found:
        parameter.grad = None
    try:
        yield found
    finally:
        for parameter, gradient in found.items():
            parameter.grad = gradient


def _split(parameters: dict[Tensor, Tensor]) -> Iterator[list[Tensor]]:
    """Lists of parameters that have at most `PART` bytes together; a larger one is alone."""
    part: list[Tensor] = []
    for parameter in parameters:
        if part and sum(each.nbytes for each in (*part, parameter)) > PART:
            yield part
            part = []
        part.append(parameter)
    yield part


@contextmanager
def _stand_ins(optimizer: Optimizer, gradients: dict[Tensor, Tensor]) -> Iterator[None]:
    """Puts whole parameters with their gradients and state in the place of sharded ones, and takes what changed."""
    made: dict[Tensor, nn.Parameter] = {}
    for parameter, gradient in gradients.items():
        stand_in = made[parameter] = nn.Parameter(whole(parameter.detach()))
        stand_in.grad = whole(gradient)
        if state := optimizer.state.pop(parameter, None):
            optimizer.state[stand_in] = {
                key: whole(value) if isinstance(value, DTensor) else value for key, value in state.items()
            }
    before = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [made.get(parameter, parameter) for parameter in group["params"]]
    try:
        yield
        for parameter, stand_in in made.items():
            local(parameter).copy_(own_part(stand_in.data, parameter))
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        for parameter, stand_in in made.items():
            if state := optimizer.state.pop(stand_in, None):
                optimizer.state[parameter] = {key: _spread(value, parameter) for key, value in state.items()}


def _spread(value: object, parameter: Tensor) -> object:
    """A value of the state as it is kept between steps: sharded like `parameter` if it has the same shape."""
    if not (isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape):
        return value
    # src_data_rank=None: every rank has the whole value, so nothing is sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
