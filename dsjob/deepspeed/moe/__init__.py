"""`deepspeed.moe`: what programs ask of a model without experts. dsjob has no experts."""

from dsjob.deepspeed.moe import utils as utils
