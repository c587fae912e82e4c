"""`deepspeed.ops.aio`: asynchronous file I/O, which dsjob does not support."""

from dsjob.deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
