"""What a test needs from the machine it runs on. Each function gives the reason to skip, or None where all is there."""

from __future__ import annotations

import functools
import os
import shutil

import torch


@functools.cache
def lacks_fp16() -> str | None:
    """DeepSpeed takes fp16 on a CPU only where oneDNN computes in it."""
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    return "DeepSpeed needs a CPU with fp16 instructions (avx512_fp16 or amx_fp16) for fp16"


def lacks_root() -> str | None:
    """Other owners of files and small file systems are root's to make."""
    return None if os.geteuid() == 0 else "only root gives files to other users and mounts file systems"


def lacks_commands(*names: str) -> str | None:
    """Programs that the test starts."""
    missing = [name for name in names if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else None
