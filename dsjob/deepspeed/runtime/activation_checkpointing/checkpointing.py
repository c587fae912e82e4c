"""`deepspeed.runtime.activation_checkpointing.checkpointing`: `deepspeed.checkpointing` by its longer name."""

from __future__ import annotations

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.checkpointing import CudaRNGStatesTracker as CudaRNGStatesTracker
from dsjob.deepspeed.checkpointing import checkpoint as checkpoint
from dsjob.deepspeed.checkpointing import configure as configure
from dsjob.deepspeed.checkpointing import get_cuda_rng_tracker as get_cuda_rng_tracker
from dsjob.deepspeed.checkpointing import is_configured as is_configured
from dsjob.deepspeed.checkpointing import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from dsjob.deepspeed.checkpointing import non_reentrant_checkpoint as non_reentrant_checkpoint
from dsjob.deepspeed.checkpointing import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from dsjob.deepspeed.checkpointing import reset as reset
from dsjob.deepspeed.checkpointing import set_num_layers as set_num_layers

__getattr__ = _explain_names(__name__)
