"""`deepspeed.zero`: in DeepSpeed, another name of `deepspeed.runtime.zero`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime import zero as _zero
from dsjob.parallel.zero import GatheredParameters as GatheredParameters
from dsjob.parallel.zero import register_external_parameter as register_external_parameter
from dsjob.parallel.zero import unregister_external_parameter as unregister_external_parameter
from dsjob.parallel.zero_init import Init as Init

MiCS_Init = Init  # the strategy creates the groups of MiCS later, from `mics_shard_size`

__getattr__ = _explain_names(__name__, lambda name: getattr(_zero, name))
