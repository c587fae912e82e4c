"""Loads an engine's micro batches, for programs with their own dataset or loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsjob.data import Epochs, is_loader, load_training, take_loader
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError


def load_batches(
    engine: Engine,
    dataset: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    pin_memory: bool = True,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
) -> Epochs:
    """A loader of this rank's micro batches. Each iteration over it is one epoch.

    dataset: a dataset, or a loader such as torch's DataLoader, which is used unchanged. batch_size: samples per micro
    batch; by default the engine's.
    """
    size, world, seed = batch_size or engine.rhythm.micro_batch, engine.world, engine.spec.trainer.seed
    if is_loader(dataset):
        if collate is not None:
            raise UsageError("training_data is a loader, which builds its own batches", hint="omit collate_fn")
        key = "train_micro_batch_size_per_gpu"
        given = take_loader(dataset, micro_batch=size, world=world, seed=seed, name="training_data", key=key)
        return Epochs(given, size * world.data_size)
    loader = load_training(
        dataset,
        micro_batch=size,
        world=world,
        seed=seed,
        shuffle=shuffle,
        collate=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        name="training_data",
    )
    return Epochs(loader, size * world.data_size)
