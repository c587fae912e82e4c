"""`deepspeed.runtime.pipe`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.pipe import LayerSpec as LayerSpec
from dsjob.deepspeed.pipe import PipelineModule as PipelineModule
from dsjob.deepspeed.pipe import TiedLayerSpec as TiedLayerSpec
from dsjob.deepspeed.runtime.pipe.topology import ProcessTopology as ProcessTopology

__getattr__ = _explain_names(__name__)
