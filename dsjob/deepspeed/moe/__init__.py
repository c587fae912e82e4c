"""`deepspeed.moe`: what programs ask of a model without experts. dsjob has no experts."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.moe import utils as utils

__getattr__ = _explain_names(__name__)
