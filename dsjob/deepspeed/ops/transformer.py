"""`deepspeed.ops.transformer`: the encoder layer of BERT, with options that save memory."""

from dsjob.ops.transformer import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from dsjob.ops.transformer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer
