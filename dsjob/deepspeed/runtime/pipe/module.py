"""`deepspeed.runtime.pipe.module`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.pipe import LayerSpec as LayerSpec
from dsjob.deepspeed.pipe import PipelineModule as PipelineModule
from dsjob.deepspeed.pipe import TiedLayerSpec as TiedLayerSpec

__getattr__ = _explain_names(__name__)
