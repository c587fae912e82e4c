"""`deepspeed.runtime.zero.partition_parameters`.

transformers replaces `zero_wrapper_for_fp_tensor_constructor` while it builds a model, to keep the dtype of its rotary
embeddings. In DeepSpeed, `zero.Init` changes torch's constructors of tensors by it. dsjob's changes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.accelerator import get_accelerator as get_accelerator
from dsjob.parallel.presharded import ShardStatus
from dsjob.parallel.zero import GatheredParameters as GatheredParameters
from dsjob.parallel.zero import register_external_parameter as register_external_parameter
from dsjob.parallel.zero_init import Init as Init

ZeroParamStatus = ShardStatus
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """`fn` itself: a constructor of tensors such as torch.empty keeps its dtype."""
    return fn


__getattr__ = _explain_names(__name__)
