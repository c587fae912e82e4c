"""Seeding every random generator that a model, a dataset or a transform may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_rng(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
