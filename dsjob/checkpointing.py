"""DeepSpeed's functions for activation checkpointing, for models that choose themselves what to recompute.

As in DeepSpeed, the configuration applies to the whole process. An engine configures it from its document, unless
`configure` was called. The engine itself recomputes the blocks that the document names (dsjob/engine/blocks.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from dsjob import document as documents
from dsjob import storage
from dsjob.compute.activation.recompute import recompute
from dsjob.compute.activation.rng import MODEL_PARALLEL, TRACKER, CudaRNGStatesTracker, seed_generator
from dsjob.compute.activation.stores import Store
from dsjob.compute.activation.timing import show_times
from dsjob.contract import schema as contract
from dsjob.contract.bounds import check_values
from dsjob.contract.check import check_config
from dsjob.contract.spec import ActivationCheckpointing, view
from dsjob.errors import ConfigError
from dsjob.ranks.mesh import Ranks, World
from dsjob.ranks.mpu import find_model_ranks

_SECTION = "activation_checkpointing"


def _read_section(given: Mapping[str, Any]) -> ActivationCheckpointing:
    """The section with its defaults filled in. Raises ConfigError with all problems."""
    given = {key: value for key, value in given.items() if value is not None}
    problems = [p for p in check_config({_SECTION: given}) if p.path[:1] == (_SECTION,) and p.severity == "error"]
    if problems:
        raise ConfigError(problems)
    return view(ActivationCheckpointing, contract.fill_defaults(given, contract.job_schema()["properties"][_SECTION]))


class _Setup:
    """The configuration of this process."""

    def __init__(self) -> None:
        self.configured = False
        self.model = Ranks()
        self.world: World | None = None
        self.store = Store(_read_section({}))


_setup = _Setup()


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configures how `checkpoint` stores inputs until the backward pass.

    `mpu_`: an object with get_model_parallel_group() (or Megatron's get_tensor_model_parallel_group()), or None.
    `deepspeed_config`: a dict, or the path of a JSON file, with a section activation_checkpointing. Other arguments
    override that section. Raises ConfigError for invalid or conflicting values.
    """
    if deepspeed_config is None or isinstance(deepspeed_config, Mapping):
        config = dict(deepspeed_config or {})
        if problems := check_values(config, "config"):
            raise ConfigError(problems)
    else:
        source = os.fspath(deepspeed_config)
        config = documents.require_few(documents.parse(storage.read_text(source), source)).value
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    given = {key: value for key, value in arguments.items() if value is not None}
    section = _read_section({**config.get(_SECTION, {}), **given})
    _setup.model = find_model_ranks(mpu_)
    adopt(section)
    _setup.configured = True


def use_ranks(world: World) -> None:
    """Adopts an engine's ranks. `checkpoint` uses its model-parallel ranks unless `configure` was called."""
    _setup.world = world
    if not _setup.configured:
        _setup.model = world.model


def find_ranks() -> World | None:
    """The ranks of the most recent engine, as divided by its mpu."""
    return _setup.world


def adopt(section: ActivationCheckpointing) -> None:
    """Applies `section` to this process. Unlike `configure`, a later engine may override it."""
    _setup.store = make_store(section)


def make_store(section: ActivationCheckpointing) -> Store:
    """A store with the options in `section`, over the model-parallel ranks of this process."""
    if section.profile:
        show_times()
    return Store(section, _setup.model.group)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _setup.configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` without keeping its activations, which the backward pass recomputes. Returns its result.

    The recomputation draws the same random numbers. Inputs need not require gradients.
    """
    return recompute(function, args, kwargs, store=_setup.store)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Frees the buffers of contiguous_memory_optimization. Optional: rows are reused once they are free."""
    _setup.store.reset()


def set_num_layers(nlayers: int) -> None:
    """Sets number_checkpoints."""
    adopt(_read_section({**asdict(_setup.store.section), "number_checkpoints": nlayers}))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turns partition_activations on or off."""
    adopt(replace(_setup.store.section, partition_activations=partition_activation))


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The named random states of this process. Without CUDA, they are those of the CPU's generator."""
    return TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the generator with `seed`, and adds a random state to the tracker that differs by model-parallel rank.

    Call it after `configure`, instead of torch.cuda.manual_seed. As in Megatron, the second seed is seed + 2718 + the
    rank in the model-parallel group.
    """
    TRACKER.reset()
    seed_generator(seed)
    TRACKER.add(MODEL_PARALLEL, seed + 2718 + _setup.model.rank)


__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
