"""Seeds all random generators that a model, a dataset or a transform may use."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_rng(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    # NumPy only takes 32 bits.
    np.random.seed(seed % 2**32)
    # On GPUs, torch only notes the seed until a generator is first used, so this does not initialise CUDA.
    torch.manual_seed(seed)
