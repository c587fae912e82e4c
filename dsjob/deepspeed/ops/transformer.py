"""`deepspeed.ops.transformer`: the encoder layer of BERT, with options that save memory."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.ops.transformer import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from dsjob.ops.transformer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer

__getattr__ = _explain_names(__name__)
