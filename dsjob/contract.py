"""What the loop expects of models, losses and metrics: how a batch goes in, and where the loss comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsjob.errors import ContractError

LossFunction = Callable[[Any, Any], Any]

_ADVICE = 'return {"loss": ...}, (loss, ...), an object with .loss or the scalar itself, or give loss._target_'


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """The model's output for a batch: a mapping is passed as keywords, a tuple or list by position, all else as one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def find_loss(outputs: Any, batch: Any, function: LossFunction | None) -> Tensor:
    """The scalar loss: `function`(outputs, batch) where given; else `.loss`, `["loss"]`, the first element or itself.

    Raises ContractError where there is none, or it is no scalar tensor.
    """
    if function is not None:
        loss, where = function(outputs, batch), f"the loss function ({_name(function)}) returned"
    elif getattr(outputs, "loss", None) is not None:
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
    if not isinstance(loss, Tensor):
        raise ContractError(f"{where} {type(loss).__name__}, not a loss", hint=_ADVICE)
    if loss.numel() != 1:
        raise ContractError(f"{where} a tensor of shape {list(loss.shape)}, not a scalar loss", hint=_ADVICE)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ContractError(
            "the loss does not depend on any trainable parameter", hint="detached, or every parameter frozen?"
        )
    return loss.reshape(())


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
