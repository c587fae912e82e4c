"""`deepspeed.profiling.flops_profiler`: operations, parameters and latency of a model and its modules."""

from __future__ import annotations

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler as FlopsProfiler
from dsjob.deepspeed.profiling.flops_profiler.profiler import get_model_profile as get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
__getattr__ = _explain_names(__name__)
