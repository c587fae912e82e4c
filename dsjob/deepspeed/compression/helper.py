"""`deepspeed.compression.helper`: the older place of two functions, from which DeepSpeed-Chat imports them."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.utils.module_utils import recursive_getattr as recursive_getattr
from dsjob.deepspeed.utils.module_utils import recursive_setattr as recursive_setattr

__getattr__ = _explain_names(__name__)
