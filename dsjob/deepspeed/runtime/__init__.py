"""`deepspeed.runtime`."""

from dsjob.deepspeed.runtime import engine as engine
from dsjob.deepspeed.runtime import lr_schedules as lr_schedules
