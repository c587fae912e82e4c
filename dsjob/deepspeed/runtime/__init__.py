"""`deepspeed.runtime`."""

from dsjob.deepspeed.runtime import lr_schedules as lr_schedules
