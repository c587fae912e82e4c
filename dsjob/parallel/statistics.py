"""Modules with running statistics (batch norms) in a model that computes in half precision: in fp32, all of them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def keep_statistics_wide(model: nn.Module) -> None:
    """Has the model's batch norms compute in fp32, on inputs and for outputs of any dtype; their statistics are fp32.

    A mean over hundreds of batches would come to rest in bf16 long before it is right, and torch takes no running
    statistics in another dtype than the weights.
    """
    for module in model.modules():
        if not isinstance(module, _NormBase) or module.running_mean is None or module.running_var is None:
            continue
        module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()
        module.forward = partial(_forward_in_fp32, module)  # which a copy has with the copy in it


def _forward_in_fp32(module: _NormBase, inputs: Tensor) -> Tensor:
    # A copy that shares buffers: gradients pass through the cast to the parameters, whatever has gathered them.
    wide: Any = copy.copy(module)
    wide._parameters = {name: p.float() if p is not None else None for name, p in module._parameters.items()}
    outputs: Tensor = type(module).forward(wide, inputs.float())
    return outputs.to(inputs.dtype)
