"""`deepspeed.pipe`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.parallel.pipeline.layers import LayerSpec as LayerSpec
from dsjob.parallel.pipeline.layers import TiedLayerSpec as TiedLayerSpec
from dsjob.parallel.pipeline.module import PipelineModule as PipelineModule
from dsjob.ranks.topology import PipeDataParallelTopology as PipeDataParallelTopology
from dsjob.ranks.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from dsjob.ranks.topology import ProcessTopology as ProcessTopology

TiledLayerSpec = TiedLayerSpec  # the spelling of the 0.3 manual

__path__ = _stand_for(__name__)
__getattr__ = _explain_names(__name__)
