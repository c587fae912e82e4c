"""`deepspeed.zero`: in DeepSpeed, another name of `deepspeed.runtime.zero`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime import zero as _zero
from dsjob.deepspeed.runtime.zero import GatheredParameters as GatheredParameters
from dsjob.deepspeed.runtime.zero import Init as Init
from dsjob.deepspeed.runtime.zero import MiCS_Init as MiCS_Init
from dsjob.deepspeed.runtime.zero import register_external_parameter as register_external_parameter
from dsjob.deepspeed.runtime.zero import unregister_external_parameter as unregister_external_parameter

__getattr__ = _explain_names(__name__, lambda name: getattr(_zero, name))
