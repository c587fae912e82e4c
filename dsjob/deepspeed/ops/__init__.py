"""`deepspeed.ops`: optimizers. They use torch's foreach and fused steps, or dsjob's kernels, built on first use."""

from dsjob.deepspeed.ops import adagrad as adagrad
from dsjob.deepspeed.ops import adam as adam
from dsjob.deepspeed.ops import lamb as lamb
from dsjob.deepspeed.ops import lion as lion

__compatible_ops__ = {
    **dict.fromkeys(("fused_adam", "cpu_adam", "cpu_adagrad", "fused_lamb", "fused_lion", "cpu_lion"), True),
    **dict.fromkeys(("async_io", "transformer", "quantizer", "sparse_attn", "inference_core_ops"), False),
}
