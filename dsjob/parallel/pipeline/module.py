"""DeepSpeed's PipelineModule: a model given as layers, of which each rank builds its own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dsjob.checkpointing import checkpoint
from dsjob.errors import UsageError
from dsjob.parallel.pipeline.layers import Layer, LayerSequence, Recompute, count_parameters, list_layers
from dsjob.parallel.pipeline.measure import measure_layers
from dsjob.parallel.pipeline.passes import MakeSchedule
from dsjob.parallel.pipeline.stage import Stage, cut_sequence
from dsjob.pipelines.orders import SCHEDULES
from dsjob.pipelines.partition import partition
from dsjob.ranks.agreement import on_rank_0
from dsjob.ranks.divide import divide_by
from dsjob.ranks.mesh import World, join_world
from dsjob.ranks.seeding import seed_rng
from dsjob.ranks.topology import PipeDataParallelTopology, ProcessTopology

# What DeepSpeed's PipelineModule has and this one does not: what to do instead.
_ABSENT = {
    "allreduce_tied_weight_gradients": "leave it out: train_batch() adds up the gradients of tied layers",
    "save_state_dict": "call engine.save_checkpoint(folder); `dsjob convert` writes plain weights from it",
    "load_state_dir": "call engine.load_checkpoint(folder)",
}


class PipelineModule(nn.Module):
    """A model given as a sequence of layers: modules, functions of one argument, LayerSpec or TiedLayerSpec.

    num_stages: among which the layers are divided; or `topology`, with an axis `pipe`. loss_fn(outputs, labels): the
    loss of a micro batch. seed_layers: seeds each layer by `base_seed` and its number before building it, and by the
    micro batch too before calling it, so that nothing depends on the number of stages. seed_fn: sets a seed, in place
    of torch's, NumPy's and Python's. partition_method: see `dsjob.pipelines.partition`; `time` needs `example`, the
    inputs of a micro batch. activation_checkpoint_interval: recomputes the activations of groups of so many layers with
    `activation_checkpoint_func`, unless none of them has parameters; 0: none. checkpointable_layers, dynamic_shape: no
    effect; shapes may always change.
    chunks: parts of the model on each rank. `schedule`: of training, by default 1F1B, or interleaved with several
    chunks; set it before `initialize` to another one: (micro batches, stages, stage) -> a PipeSchedule.

    Every rank builds the same PipelineModule. Raises UsageError.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Recompute = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        example: Any = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        self.schedule: MakeSchedule = partial(SCHEDULES["1f1b" if chunks == 1 else "interleaved"], chunks=chunks)
        self._world = join_world()
        ranks = self._world.everyone
        self._topology = _require_topology(topology, num_stages, ranks.size)
        self.num_stages = max(self._topology.get_dim("pipe"), 1)
        self.stage_id = getattr(self._topology.get_coord(ranks.rank), "pipe", 0)
        self.base_seed, self.seed_layers = base_seed, seed_layers
        self.__dict__["loss_fn"] = loss_fn  # no submodule: it is no layer
        self.seed_fn = seed_fn or seed_rng
        listed = list_layers(layers)
        seconds = None
        if partition_method.lower() == "time":
            if example is None:
                raise UsageError(
                    "partition_method time measures the layers, and needs inputs for them",
                    hint="pass example=..., the inputs of a micro batch",
                )
            seconds = on_rank_0(ranks, lambda: measure_layers(listed, (example,), self._world.device))
        self.parts = partition(
            partition_method,
            self.num_stages * chunks,
            names=[layer.kind for layer in listed],
            parameters=count_parameters(listed),
            seconds=seconds,
        )
        self.stage: Stage = cut_sequence(
            self,
            listed,
            self.parts,
            rank=self.stage_id,
            ranks=self.num_stages,
            build=self._build,
            interval=activation_checkpoint_interval,
            again=activation_checkpoint_func,
            seed=base_seed if seed_layers else None,
            set_seed=self.seed_fn,
        )

        layers_here = self.stage.module.forward
        assert isinstance(layers_here, LayerSequence)
        self.__dict__["_layers"] = layers_here

    loss_fn: Callable[[Any, Any], Tensor] | None
    _layers: LayerSequence

    def _build(self, number: int, layer: Layer) -> Any:
        if self.seed_layers:
            self.seed_fn(self.base_seed + number)
        return layer.make()

    def divide(self) -> World:
        """The ranks as the topology divides them: only the last stage reports metrics. A collective, which creates
        process groups."""
        world = divide_by(self._topology, self._world)
        last = world.pipe.rank == world.pipe.size - 1
        return dataclasses.replace(world, opaque=world.tensor.size > 1, reports=last)

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topology

    @property
    def activation_checkpoint_interval(self) -> int:
        """Activations are recomputed in groups of so many layers; 0: all are kept."""
        return self._layers.interval

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recomputes activations in groups of so many layers from now on; 0 keeps all."""
        self._layers.interval = interval

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _ABSENT:
                raise AttributeError(f"dsjob's PipelineModule has no {name}: {_ABSENT[name]}")
            return super().__getattr__(name)

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """The beginning of the names of checkpoint files with layers of this module, for programs that write them."""
        return os.path.join(checkpoints_path, str(tag), "module")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file for one of this rank's layers, counted from its first."""
        number = self.parts[self.stage_id] + local_layer_idx
        place = self._topology.get_rank_repr(self._world.everyone.rank)
        return os.path.join(ckpt_dir, f"layer_{number:02d}{f'-{place}' if place else ''}-model_states.pt")


def _require_topology(topology: ProcessTopology | None, stages: int | None, ranks: int) -> ProcessTopology:
    if topology is None:
        if stages is None:
            raise UsageError("PipelineModule needs num_stages or topology", hint="for example num_stages=2")
        if ranks % stages:
            raise UsageError(
                f"{ranks} rank{'s' * (ranks > 1)} do not divide into pipelines of {stages} stages",
                hint=f"start {stages * max(1, ranks // stages)} ranks",
            )
        return PipeDataParallelTopology(num_pp=stages, num_dp=ranks // stages)
    if stages is not None and stages != topology.get_dim("pipe"):
        raise UsageError(f"num_stages is {stages}, but the topology has {topology.get_dim('pipe')}")
    if topology.world_size() != ranks:
        raise UsageError(f"{topology} has {topology.world_size()} ranks, but the job has {ranks}")
    return topology
