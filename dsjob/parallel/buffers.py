"""Buffers of a model, such as running statistics, on several ranks."""

from __future__ import annotations

from torch import nn

from dsjob.parallel.strategy import broadcast
from dsjob.ranks.mesh import World
from dsjob.torch_private import list_saved_buffers


class SharedBuffers:
    """Starts each step with rank 0's buffers on all ranks, so that a checkpoint is valid for all of them.

    Buffers that are not saved, such as position ids and the frequencies of rotary embeddings, stay as each rank has
    them: most never change, and sending them would make every step wait.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world, self._differ = world, True
        # A walk over all modules takes as long as a step of a small one.
        self._owners = [module for module in model.modules() if list_saved_buffers(module)]

    def share(self) -> None:
        """Called at the start of a micro step. A collective in the first one of a step."""
        if not (self._differ and self._owners):
            return
        # Listed each time, because a model may have replaced them.
        found = [getattr(owner, name) for owner in self._owners for name in list_saved_buffers(owner)]
        broadcast([buffer for buffer in found if buffer is not None], self._world)
        self._differ = False

    def end_step(self) -> None:
        """Called after a step: forward passes may have changed buffers on each rank."""
        self._differ = True
