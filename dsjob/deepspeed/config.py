"""`deepspeed.config`, as DeepSpeed's manual names the structs of a config: see `dsjob.config`."""

from dsjob.config import BatchConfig as BatchConfig
from dsjob.config import BF16Config as BF16Config
from dsjob.config import Config as Config
from dsjob.config import FP16Config as FP16Config
from dsjob.config import TorchAutocastConfig as TorchAutocastConfig
from dsjob.config import TrainingConfig as TrainingConfig
from dsjob.deepspeed.absent import explain_names as _explain_names

__getattr__ = _explain_names(__name__)
