"""`deepspeed.ops`: optimizers, and the transformer layer.

The optimizers use torch's foreach and fused steps, or dsjob's kernels, built on first use.
"""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.ops import adagrad as adagrad
from dsjob.deepspeed.ops import adam as adam
from dsjob.deepspeed.ops import aio as aio
from dsjob.deepspeed.ops import lamb as lamb
from dsjob.deepspeed.ops import lion as lion
from dsjob.deepspeed.ops import transformer as transformer
from dsjob.deepspeed.ops.transformer import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from dsjob.deepspeed.ops.transformer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer

__compatible_ops__ = {
    **dict.fromkeys(("fused_adam", "cpu_adam", "cpu_adagrad", "fused_lamb", "fused_lion", "cpu_lion"), True),
    **dict.fromkeys(("transformer", "stochastic_transformer", "async_io", "pin_memory"), True),
    **dict.fromkeys(("quantizer", "sparse_attn", "inference_core_ops"), False),
}

__getattr__ = _explain_names(__name__)
