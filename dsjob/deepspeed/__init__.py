"""DeepSpeed's names over dsjob: `import dsjob.deepspeed as deepspeed` in place of `import deepspeed`.

Its modules say where a program for DeepSpeed finds what it calls. Most of what they offer lives elsewhere in dsjob; the
engine with all of DeepSpeed's getters is here (`DeepSpeedEngine`). What dsjob lacks is not here, so that
importing it fails at once, with what to do instead (`absent`).
"""

from __future__ import annotations

from typing import NoReturn as _NoReturn

from dsjob import __version__ as _version
from dsjob.deepspeed import checkpointing as checkpointing
from dsjob.deepspeed import comm as comm
from dsjob.deepspeed import moe as moe
from dsjob.deepspeed import ops as ops
from dsjob.deepspeed import runtime as runtime
from dsjob.deepspeed import utils as utils
from dsjob.deepspeed import zero as zero
from dsjob.deepspeed.absent import explain as _explain
from dsjob.deepspeed.absent import explain_imports as _explain_imports
from dsjob.deepspeed.accelerator import get_accelerator as get_accelerator
from dsjob.deepspeed.entry import initialize as initialize
from dsjob.deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine
from dsjob.engine.build import add_config_arguments as add_config_arguments
from dsjob.engine.build import init_distributed as init_distributed
from dsjob.errors import ConfigError

DeepSpeedConfigError = ConfigError
dist = comm

API_VERSION = "0.19.6"  # of the DeepSpeed whose calls these are
__version__ = version = API_VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in API_VERSION.split("."))
__git_hash__ = __git_branch__ = None
dsjob_version = _version

_explain_imports()


def __getattr__(name: str) -> _NoReturn:
    raise AttributeError(_explain(name))
