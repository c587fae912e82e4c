"""`deepspeed.runtime`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime import engine as engine
from dsjob.deepspeed.runtime import lr_schedules as lr_schedules

__getattr__ = _explain_names(__name__)
