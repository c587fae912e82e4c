"""`deepspeed.profiling`: profiles of models without an engine."""

from __future__ import annotations

from dsjob.deepspeed.absent import explain_names as _explain_names

__getattr__ = _explain_names(__name__)
