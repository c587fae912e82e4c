"""`deepspeed.runtime.zero`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.zero.parameter_offload import unwrap_model_for_generation as unwrap_model_for_generation
from dsjob.deepspeed.runtime.zero.tiling import TiledLinear as TiledLinear
from dsjob.deepspeed.runtime.zero.tiling import TiledLinearReturnBias as TiledLinearReturnBias
from dsjob.parallel.presharded import ShardStatus
from dsjob.parallel.zero import GatheredParameters as GatheredParameters
from dsjob.parallel.zero import register_external_parameter as register_external_parameter
from dsjob.parallel.zero import unregister_external_parameter as unregister_external_parameter
from dsjob.parallel.zero_init import Init as Init

MiCS_Init = Init  # the strategy creates the groups of MiCS later, from `mics_shard_size`
ZeroParamStatus = ShardStatus

__getattr__ = _explain_names(__name__)
