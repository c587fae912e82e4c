"""DeepSpeed's namespace for dsjob: write `import dsjob.deepspeed as deepspeed` instead of `import deepspeed`.

Its modules define DeepSpeed's names; most implementations are elsewhere in dsjob. The engine with all of DeepSpeed's
getters is here (`DeepSpeedEngine`). Unsupported features are not defined, so importing them fails at once, with a
message that says what to use instead (`absent`).
"""

from __future__ import annotations

from dsjob import __version__ as _version
from dsjob.deepspeed import checkpoint as checkpoint
from dsjob.deepspeed import checkpointing as checkpointing
from dsjob.deepspeed import comm as comm
from dsjob.deepspeed import config as config
from dsjob.deepspeed import elasticity as elasticity
from dsjob.deepspeed import moe as moe
from dsjob.deepspeed import ops as ops
from dsjob.deepspeed import pipe as pipe
from dsjob.deepspeed import runtime as runtime
from dsjob.deepspeed import utils as utils
from dsjob.deepspeed import zero as zero
from dsjob.deepspeed.absent import explain_imports as _explain_imports
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.accelerator import get_accelerator as get_accelerator
from dsjob.deepspeed.entry import initialize as initialize
from dsjob.deepspeed.git_version_info import version as API_VERSION
from dsjob.deepspeed.ops.transformer import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from dsjob.deepspeed.ops.transformer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer
from dsjob.deepspeed.pipe import PipelineModule as PipelineModule
from dsjob.deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedConfig
from dsjob.deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine
from dsjob.deepspeed.runtime.pipe.engine import PipelineEngine as PipelineEngine
from dsjob.deepspeed.tensor_model import tp_model_init as tp_model_init
from dsjob.deepspeed.utils.init_on_device import OnDevice as OnDevice
from dsjob.deepspeed.utils.logging import log_dist as log_dist
from dsjob.deepspeed.utils.logging import logger as logger
from dsjob.engine.build import add_config_arguments as add_config_arguments
from dsjob.engine.build import init_distributed as init_distributed
from dsjob.errors import ConfigError

DeepSpeedConfigError = ConfigError
dist = comm

__version__ = version = API_VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in API_VERSION.split("."))
__git_hash__ = __git_branch__ = None
dsjob_version = _version

_explain_imports()
__getattr__ = _explain_names(__name__)
