"""`deepspeed.runtime`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime import engine as engine
from dsjob.deepspeed.runtime import lr_schedules as lr_schedules
from dsjob.deepspeed.runtime import pipe as pipe

__getattr__ = _explain_names(__name__)
