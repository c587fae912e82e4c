"""`deepspeed.runtime.torch_autocast`."""

from dsjob.engine.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME as PARAM_COMM_DTYPE_ATTR_NAME
from dsjob.engine.torch_autocast import get_autocast_dtype as get_autocast_dtype
from dsjob.engine.torch_autocast import get_comm_dtype as get_comm_dtype
from dsjob.engine.torch_autocast import (
    get_default_autocast_lower_precision_modules as get_default_autocast_lower_precision_modules,
)
from dsjob.engine.torch_autocast import has_autocast_dtype as has_autocast_dtype
from dsjob.engine.torch_autocast import has_comm_dtype as has_comm_dtype
from dsjob.engine.torch_autocast import init_autocast_params as init_autocast_params
from dsjob.engine.torch_autocast import is_autocast_initialized as is_autocast_initialized
