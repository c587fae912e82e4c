"""The checkpoints of the real DeepSpeed in tests/data: runs with losses and digests, folders with expected weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent.parent / "data"
FOLDERS = sorted(path for path in (DATA / "deepspeed_checkpoints").iterdir() if path.is_dir())
RUNS = {path.stem: path.with_suffix("") for path in sorted((DATA / "deepspeed_runs").glob("*.json"))}


def about(name: str) -> dict[str, Any]:
    """What a run's maker noted: config, losses of the four steps after the save, digests by name."""
    found: dict[str, Any] = json.loads((DATA / "deepspeed_runs" / f"{name}.json").read_text())
    return found


def digest(tensor: Tensor) -> str:
    """As `make_deepspeed_runs` notes a tensor: dtype, shape, sha256 of its bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def split(names: list[str]) -> list[list[str]]:
    """The two groups of `make_groups`: those without weight decay are one-dimensional."""
    flat = [name for name in names if name.endswith(("bias", "ln.weight", "ln_f.weight"))]
    return [[name for name in names if name not in flat], flat]
