"""`deepspeed.checkpointing`: see `dsjob.checkpointing`."""

from __future__ import annotations

from dsjob.checkpointing import CudaRNGStatesTracker as CudaRNGStatesTracker
from dsjob.checkpointing import checkpoint as checkpoint
from dsjob.checkpointing import configure as configure
from dsjob.checkpointing import get_cuda_rng_tracker as get_cuda_rng_tracker
from dsjob.checkpointing import is_configured as is_configured
from dsjob.checkpointing import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from dsjob.checkpointing import non_reentrant_checkpoint as non_reentrant_checkpoint
from dsjob.checkpointing import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from dsjob.checkpointing import reset as reset
from dsjob.checkpointing import set_num_layers as set_num_layers
from dsjob.deepspeed.absent import explain_names as _explain_names

__getattr__ = _explain_names(__name__)
