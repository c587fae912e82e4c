"""`deepspeed.checkpoint`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.checkpoint import utils as utils

__getattr__ = _explain_names(__name__)
