"""`deepspeed.checkpoint`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.checkpoint import utils as utils

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # a key that programs put into the client state

__getattr__ = _explain_names(__name__)
