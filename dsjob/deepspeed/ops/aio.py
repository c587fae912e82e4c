"""`deepspeed.ops.aio`: asynchronous file I/O. dsjob has its own (`ops/disk.py`)."""

from dsjob.deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
