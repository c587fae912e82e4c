"""`deepspeed.runtime.dataloader`."""

from dsjob.data.epochs import RepeatingLoader as RepeatingLoader
from dsjob.deepspeed.absent import explain_names as _explain_names

__getattr__ = _explain_names(__name__)
