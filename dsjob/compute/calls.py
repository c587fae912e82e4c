"""The calling convention for models, losses and metrics: how a batch is passed in, and where the loss is found."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsjob.errors import ContractError

LossFunction = Callable[[Any, Any], Any]

_ADVICE = 'return {"loss": ...}, (loss, ...), an object with .loss, or the scalar itself; or set loss._target_'

# The classes of transformers that predict the next token of their input. They shift labels by one internally.
_CAUSAL = re.compile(r"For(CausalLM|ConditionalGeneration)$|(?<!With)LMHeadModel$")


@dataclass(frozen=True)
class Loss:
    """A micro batch's loss (a scalar): the mean over its targets, or their sum if there is a `count` (float64,
    scalar)."""

    value: Tensor
    count: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """The mean over the micro batch."""
        return self.value if self.count is None else self.value / self.count.to(self.value.dtype)


def call_model(model: Callable[..., Any], batch: Any, advice: str = "") -> Any:
    """Calls the model with a batch: a mapping as keyword arguments, a tuple or list as positional arguments, anything
    else as a single argument. advice: what to do if that does not match `forward`."""
    args, keywords = spread(batch)
    return call_with(model, args, keywords, f"the batch, a {type(batch).__name__}, is", advice)


def call_with(
    model: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    described: str = "inputs are",
    advice: str = "",
) -> Any:
    """Calls the model. described: what the arguments are, for messages. advice: see `call_model`.

    Raises ContractError if they do not match the signature of its `forward`.
    """
    try:
        return model(*args, **keywords)
    except TypeError as error:
        # Either the arguments do not match the signature, which gets a clearer message, or the TypeError comes from the
        # model's own code.
        _require_taken(model, args, keywords, described, advice, error)
        raise


def spread(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The positional and the keyword arguments that a batch is passed as."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, (tuple, list)) else (batch,)), {}


def _require_taken(
    model: Any, args: Sequence[Any], keywords: Mapping[str, Any], described: str, advice: str, error: TypeError
) -> None:
    """Raises ContractError if the signature of the model's `forward` does not match the arguments."""
    module = getattr(model, "module", model)
    forward = getattr(module, "forward", module)
    try:
        taken = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    try:
        # Binding needs only the signature. It does not run the model's code again.
        taken.bind(*args, **keywords)
    except TypeError as why:
        way = f"by position, here {len(args)}" if args else f"as keywords: {', '.join(map(str, keywords)) or 'none'}"
        takes = ", ".join(taken.parameters) or "nothing"
        raise ContractError(
            f"the model's forward does not match the batch: {why}",
            hint=f"forward takes {takes}; {described} passed {way}" + (f"; {advice}" if advice else ""),
        ) from error


def find_loss(outputs: Any, batch: Any, function: LossFunction | None) -> Loss:
    """The loss: the result of `function`(outputs, batch), if given; else `.loss`, `["loss"]`, the first element of the
    outputs, or the outputs themselves. A function may return a pair (sum, count) instead of a mean.

    Raises ContractError if there is no loss, or if it is not a scalar tensor.
    """
    if function is not None:
        return read_loss(function(outputs, batch), function)
    if getattr(outputs, "loss", None) is not None:
        loss, where = outputs.loss, "the model's output .loss is"
    elif isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise ContractError(
                f"the model's output has no loss: it is a dict of {', '.join(map(str, outputs))}", hint=_ADVICE
            )
        loss, where = outputs["loss"], 'the model\'s output ["loss"] is'
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss, where = outputs[0], "the first element of the model's output is"
    else:
        loss, where = outputs, "the model's output is"
    return Loss(_require_scalar(loss, where))


def read_loss(given: Any, function: LossFunction, advice: str = _ADVICE) -> Loss:
    """The loss that `function` has returned: a mean, or a pair (sum, count). advice: what to return instead.

    Raises ContractError for anything else.
    """
    where = f"the loss function ({_name(function)}) returned"
    if isinstance(given, (tuple, list)) and len(given) == 2:
        total = _require_scalar(given[0], f"{where} a pair, whose first element is", advice)
        return Loss(total, _read_count(given[1], total, f"{where} a pair, whose second element is"))
    return Loss(_require_scalar(given, where, advice))


def _require_scalar(loss: Any, where: str, advice: str = _ADVICE) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ContractError(f"{where} {type(loss).__name__}, not a loss", hint=advice)
    # That of logits which ranks divide is a DTensor.
    plain: Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss
    if loss.numel() != 1:
        raise ContractError(f"{where} a tensor of shape {list(loss.shape)}, not a scalar loss", hint=advice)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ContractError(
            "the loss does not depend on any trainable parameter",
            hint="check whether the loss is detached, or all parameters are frozen",
        )
    return plain.reshape(())


def _read_count(count: Any, total: Tensor, where: str) -> Tensor:
    if isinstance(count, Tensor) and count.numel() == 1:
        return count.detach().reshape(()).to(total.device, torch.float64)
    if isinstance(count, (int, float)):
        return torch.full((), count, dtype=torch.float64, device=total.device)
    found = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
    raise ContractError(f"{where} {found}, not a count", hint="return (sum over the targets, number of targets)")


def to_scalar(value: Any) -> Tensor | None:
    """A number, or a tensor with one element, as a detached 0-dim tensor. None for anything else."""
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # torch.tensor raises these for a string, a ragged list, None
        return None
    return tensor.reshape(()) if tensor.numel() == 1 else None


def shifts_labels(model: nn.Module) -> bool:
    """Whether a transformers model (also inside peft) shifts `labels` by one, to predict each token from those before
    it."""
    bare = find_inside_peft(model)
    if getattr(getattr(bare, "config", None), "is_encoder_decoder", False):
        return False
    return hasattr(bare, "config") and any(_CAUSAL.search(kind.__name__) for kind in type(bare).__mro__)


def find_inside_peft(model: nn.Module) -> nn.Module:
    """The model inside peft's; any other model itself."""
    inner = getattr(model, "get_base_model", None)
    found: nn.Module = inner() if callable(inner) else model
    return found


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
