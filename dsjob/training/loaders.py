"""Builds loaders from a job's `data` section: batches of datasets, or the user's own loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.utils.data import IterableDataset

from dsjob.contract.spec import JobSpec, Target
from dsjob.data import Loader, LoaderEvaluation, NoLoader, is_loader, load_training, take_loader
from dsjob.data.loader import choose_loading, count_dataset
from dsjob.data.passes import require_same_length
from dsjob.errors import DataError, DsjobError
from dsjob.ranks.failures import follows_from_another
from dsjob.ranks.mesh import World
from dsjob.ranks.waiting import waiting_for_all
from dsjob.trust.frames import TRACEBACK_HINT, describe_failure, find_path
from dsjob.trust.grant import Trust
from dsjob.trust.targets import build_callable, call_target, find_target, placing_target

Collate = Callable[..., Any] | None
_DIVIDING = {"rank", "world_size", "num_replicas"}


def build_collate(spec: JobSpec, trust: Trust) -> Collate:
    """`data.collate`, which training and evaluation share; None for the default. Raises TargetError."""
    return build_callable(spec.data.collate, "data.collate", trust) if spec.data.collate else None


def call_training_data(spec: JobSpec, trust: Trust) -> Any:
    """What `data.train` returns. Raises DataError."""
    if spec.data.train is None:
        raise DataError("the job has no training data", hint="add data.train")
    return call_data(spec.data.train, ("train",), trust)


@contextmanager
def _placing_data(*key: str) -> Iterator[None]:
    """Says of a DataError that it is about the target `data.key`, unless it says more itself."""
    try:
        yield
    except DataError as error:
        error.put_at(("data", *key, "_target_"))
        raise


@_placing_data("train")
def build_training_data(
    spec: JobSpec, world: World, collate: Collate, trust: Trust, read: Callable[[], Any] | None = None
) -> Loader:
    """The training loader of this rank. read: returns the data instead of the target `data.train`.

    Raises DataError, also for errors in the user's code.
    """
    # With an mpu, ranks in the middle of a model may read nothing. They still take part in every collective.
    if not world.loads:
        return NoLoader()
    data = read() if read is not None else call_training_data(spec, trust)
    keys = ("loader", "collate", "group_by_length", "shuffle_buffer")
    given = [key for key in keys if getattr(spec.data, key)]
    if is_loader(data) and given:
        raise DataError(
            f"data.train ({type(data).__name__}) is already a loader, so data.{given[0]} has no effect",
            hint=f"remove data.{given[0]}, or make data.train return a dataset",
        )
    common: dict[str, Any] = {"micro_batch": spec.trainer.micro_batch, "world": world, "seed": spec.trainer.seed}
    if spec.data.loader:
        loader, divided = _call_loader(spec, data, world, collate, trust, train=True)
        with _placing_data("loader"):
            return take_loader(loader, divided=divided, name="data.loader", **common)
    if is_loader(data):
        return take_loader(data, **common)
    return load_training(
        data,
        shuffle=spec.data.shuffle,
        shuffle_buffer=spec.data.shuffle_buffer,
        grouped=spec.trainer.train_batch if spec.data.group_by_length else None,
        collate=collate,
        **choose_loading(spec.data, data, world),
        **common,
    )


def build_evaluation_sets(
    spec: JobSpec,
    world: World,
    collate: Collate,
    trust: Trust,
    *roles: Literal["eval", "test"],
    read: Callable[[str, str], Any] | None = None,
) -> dict[str, Any]:
    """The sets of these `roles` by the prefix of their metrics (see Data.list_sets). Each is a dataset or a
    LoaderEvaluation, or None if this rank reads no data.

    read: returns the data of a role and the name of a set, instead of its target. A collective. Raises the same errors
    as `build_training_data`.
    """
    sets = {}
    for prefix, target in spec.data.list_sets(*roles).items():
        key = prefix.split("/")
        with _placing_data(*key):
            data = None
            with waiting_for_all(world, ".".join(("data", *key))):
                if world.loads:
                    data = read(key[0], key[-1] if key[1:] else "") if read else call_data(target, tuple(key), trust)
            loads = world.loads
            sets[prefix] = _build_evaluation_set(spec, world, collate, trust, tuple(key), data) if loads else None
    return sets


def _build_evaluation_set(
    spec: JobSpec, world: World, collate: Collate, trust: Trust, key: tuple[str, ...], data: Any
) -> Any:
    name, seed = ".".join(("data", *key)), spec.trainer.seed
    if is_loader(data):  # data.train may still be a dataset, which then uses data.loader and data.collate
        return LoaderEvaluation(data, world=world, seed=seed, name=name)
    if spec.data.loader:
        loader, divided = _call_loader(spec, data, world, collate, trust, train=False)
        return LoaderEvaluation(loader, world=world, seed=seed, divided=divided, name=name)
    length = count_dataset(data, name)
    if world.model.size == 1:
        require_same_length(length, world, name)
    return data


def call_data(target: Target, key: tuple[str, ...], trust: Trust) -> Any:
    """Calls a target of the data section. Turns errors of the user's code into DataError."""
    try:
        return call_target(target, trust=trust, where=("data", *key))
    except DsjobError:
        raise
    except Exception as error:
        if follows_from_another(error):
            raise
        failed = DataError(describe_failure(error), hint=TRACEBACK_HINT)
        failed.put_at(find_path(error))
        raise failed from error


@_placing_data("train")
def share_samples(loader: Loader, world: World) -> None:
    """Checks that all ranks read equally many samples, and tells the number to ranks that read none. Raises
    DataError."""
    if isinstance(loader, NoLoader):
        loader.samples_per_epoch = require_same_length(None, world, "data.train")
    else:
        require_same_length(loader.samples_per_epoch, world, "data.train")


def _call_loader(
    spec: JobSpec, dataset: Any, world: World, collate: Collate, trust: Trust, *, train: bool
) -> tuple[Any, bool]:
    """Calls data.loader with a dataset. Returns the loader, and whether it divides batches among ranks itself.

    It receives those of dsjob's arguments that are in its signature, unless the document gives them.
    """
    target = spec.data.loader
    assert target is not None
    shuffles = {} if isinstance(dataset, IterableDataset) else {"shuffle": spec.data.shuffle and train}
    offered = {
        "batch_size": spec.trainer.micro_batch if train else spec.trainer.eval_micro_batch or spec.trainer.micro_batch,
        "collate_fn": collate,
        **choose_loading(spec.data, dataset, world),
        "rank": world.data_rank,
        "world_size": world.data_size,
        "num_replicas": world.data_size,
        "seed": spec.trainer.seed,
        "train": train,
        **shuffles,
    }
    where = ("data", "loader")
    with placing_target(where):
        names = inspect.signature(find_target(target.path, trust)).parameters
    free = {name: value for name, value in offered.items() if name in names and name not in target.arguments}
    if {"sampler", "batch_sampler"} & target.arguments.keys():
        free.pop("shuffle", None)
    if "batch_sampler" in target.arguments:
        free.pop("batch_size", None)
    loader = call_target(Target(target.path, {**target.arguments, **free}), dataset, trust=trust, where=where)
    if not hasattr(loader, "__iter__"):
        message = f"data.loader: {target.path} returned {type(loader).__name__}, which is not iterable"
        error = DataError(message, hint="return an iterable of batches, such as torch.utils.data.DataLoader")
        error.put_at((*where, "_target_"))
        raise error
    return loader, bool(_DIVIDING & free.keys())
