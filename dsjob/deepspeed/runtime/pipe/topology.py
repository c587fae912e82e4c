"""`deepspeed.runtime.pipe.topology`: topologies, and the grid of ranks that an engine's mpu is."""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.utils.groups import find_group
from dsjob.ranks.divide import divide_by
from dsjob.ranks.mesh import World, join_world
from dsjob.ranks.topology import PipeDataParallelTopology as PipeDataParallelTopology
from dsjob.ranks.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from dsjob.ranks.topology import ProcessTopology as ProcessTopology


class PipelineParallelGrid:
    """This rank's place in a pipeline, with Megatron's method names: the mpu of a PipelineEngine.

    topology: of all ranks of the job. process_group: has no effect. world: the ranks, divided by it; if None, divided
    here, in a collective. Raises UsageError.
    """

    def __init__(self, topology: ProcessTopology, process_group: object = None, *, world: World | None = None) -> None:
        world = world or divide_by(topology, join_world())
        self._topo, self._world = topology, world
        self.global_rank, self.world_size = world.everyone.rank, world.everyone.size
        self.data_parallel_size, self.pipe_parallel_size = world.data_size, world.pipe.size
        self.model_parallel_size = self.slice_parallel_size = world.tensor.size
        self.stage_id, self.data_parallel_id = world.pipe.rank, world.data_rank
        place: Any = topology.get_coord(self.global_rank)._asdict()
        # The ranks of the job that are data-parallel to this one, and those of its pipeline.
        self.dp_group = topology.filter_match(**{axis: number for axis, number in place.items() if axis != "data"})
        self.pp_group = topology.filter_match(**{axis: number for axis, number in place.items() if axis != "pipe"})
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank's number in the job."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """The number of this rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """The number of this rank's pipeline."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank that has a stage, and otherwise this rank's coordinates or those in `kwargs`."""
        place: Any = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**{**place._replace(pipe=stage_id)._asdict(), **kwargs})

    def get_pipe_parallel_rank(self) -> int:
        """The number of this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> _dist.ProcessGroup | None:
        """The ranks of this rank's pipeline."""
        return find_group(self._world.pipe)

    def get_data_parallel_rank(self) -> int:
        """The number of this rank's pipeline."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> _dist.ProcessGroup | None:
        """The ranks that have the same layers."""
        return find_group(self._world.data)

    def get_model_parallel_rank(self) -> int:
        """This rank's part of each layer."""
        return self._world.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        """The number of parts of each layer."""
        return self._world.tensor.size

    def get_model_parallel_group(self) -> _dist.ProcessGroup | None:
        """The ranks that have the other parts of the same layers."""
        return find_group(self._world.tensor)

    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group


__getattr__ = _explain_names(__name__)
