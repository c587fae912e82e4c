"""`deepspeed.ops.aio`: asynchronous file I/O. dsjob has its own (`ops/disk.py`)."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder

__getattr__ = _explain_names(__name__)
