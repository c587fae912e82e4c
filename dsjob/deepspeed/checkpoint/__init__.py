"""`deepspeed.checkpoint`."""

from dsjob.deepspeed.checkpoint import utils as utils
