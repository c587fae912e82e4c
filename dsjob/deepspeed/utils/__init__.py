"""`deepspeed.utils`."""

from __future__ import annotations

from dsjob.data.epochs import RepeatingLoader as RepeatingLoader
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.deepspeed.utils import groups as groups
from dsjob.deepspeed.utils import logging as logging
from dsjob.deepspeed.utils.init_on_device import OnDevice as OnDevice
from dsjob.deepspeed.utils.logging import log_dist as log_dist
from dsjob.deepspeed.utils.logging import logger as logger
from dsjob.deepspeed.utils.logging import set_log_level_from_string as set_log_level_from_string
from dsjob.parallel.leaves import get_z3_leaf_modules as get_z3_leaf_modules
from dsjob.parallel.leaves import set_z3_leaf_module as set_z3_leaf_module
from dsjob.parallel.leaves import set_z3_leaf_modules as set_z3_leaf_modules
from dsjob.parallel.leaves import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from dsjob.parallel.leaves import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from dsjob.parallel.leaves import unset_z3_leaf_modules as unset_z3_leaf_modules
from dsjob.parallel.leaves import z3_leaf_module as z3_leaf_module
from dsjob.parallel.parameters import safe_get_full_fp32_param as safe_get_full_fp32_param
from dsjob.parallel.parameters import safe_get_full_grad as safe_get_full_grad
from dsjob.parallel.parameters import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from dsjob.parallel.parameters import safe_get_local_fp32_param as safe_get_local_fp32_param
from dsjob.parallel.parameters import safe_get_local_grad as safe_get_local_grad
from dsjob.parallel.parameters import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from dsjob.parallel.parameters import safe_set_full_fp32_param as safe_set_full_fp32_param
from dsjob.parallel.parameters import safe_set_full_grad as safe_set_full_grad
from dsjob.parallel.parameters import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from dsjob.parallel.parameters import safe_set_local_fp32_param as safe_set_local_fp32_param
from dsjob.parallel.parameters import safe_set_local_grad as safe_set_local_grad
from dsjob.parallel.parameters import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from dsjob.parallel.parameters import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized

_stand_for(__name__, "tensor_fragment")
__getattr__ = _explain_names(__name__)
