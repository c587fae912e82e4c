"""`deepspeed.ops.transformer`: the encoder layer of BERT, with options that save memory."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.ops.transformer import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from dsjob.ops.transformer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer

__path__ = _stand_for(__name__, "transformer")
__getattr__ = _explain_names(__name__)
