"""Captures and restores all random generators of a rank, and the named ones of model parallelism, as JSON values."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsjob.checkpoint.format.values import decode, encode
from dsjob.compute.activation.rng import TRACKER, read_state


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, NumPy and torch, and of the GPU if `device` is one."""
    # legacy=True: as a tuple, whose parts are plain values.
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": encode(random.getstate()),
        "numpy": encode((str(kind), np.asarray(keys).tolist(), position, has_gauss, gauss)),
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    tracked = {name: _to_text(own) for name, own in TRACKER.get_states().items()}
    return {**state, **({"tracked": tracked} if tracked else {})}


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Restores all generators. Skips those of a GPU if `state` or this rank has none."""
    random.setstate(decode(state["python"]))
    kind, keys, *rest = decode(state["numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)
    size = read_state().numel()  # states of another type of device have another size, and cannot be restored here
    saved = {name: _from_text(own) for name, own in state.get("tracked", {}).items()}
    TRACKER.set_states({**TRACKER.get_states(), **{n: own for n, own in saved.items() if own.numel() == size}})


@contextmanager
def keep_rng(device: torch.device) -> Iterator[None]:
    """Restores all generators on exit, so that the block does not change the random numbers that follow it."""
    before = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(before, device)


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
