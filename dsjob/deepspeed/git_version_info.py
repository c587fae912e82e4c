"""`deepspeed.git_version_info`: the DeepSpeed whose calls these are, and what the installed torch was built with."""

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names

version = "0.19.6"
git_hash = git_branch = None
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}

__getattr__ = _explain_names(__name__)
