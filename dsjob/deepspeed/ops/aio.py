"""`deepspeed.ops.aio`: asynchronous files, which dsjob has not."""

from dsjob.deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
