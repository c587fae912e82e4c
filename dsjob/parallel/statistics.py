"""Keeps modules with running statistics (batch norms) in fp32, in a model that computes in half precision."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from dsjob.torch_private import NormBase, copy_with_parameters


def keep_statistics_wide(model: nn.Module) -> None:
    """Makes the model's batch norms compute in fp32, with fp32 statistics. Inputs and outputs may have any dtype.

    In bf16, a running mean would stop changing long before it is accurate, and torch requires running statistics and
    weights to have the same dtype.
    """
    for module in model.modules():
        if not isinstance(module, NormBase) or module.running_mean is None or module.running_var is None:
            continue
        module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()
        module.forward = partial(_forward_in_fp32, module)  # deepcopy also copies the module inside a partial


def _forward_in_fp32(module: NormBase, inputs: Tensor) -> Tensor:
    # A shallow copy that shares buffers. Gradients flow through the cast to the original (or gathered) parameters.
    wide = copy_with_parameters(module, Tensor.float)
    outputs: Tensor = type(module).forward(wide, inputs.float())
    return outputs.to(inputs.dtype)
