"""Parameters that cannot be sharded, in a sharded model: 0-dim and empty ones.

Every rank holds them whole. Their masters are replicated DTensors of the mesh, so that the optimizer sees only one kind
of tensor. One small collective averages their gradients over the ranks.

The collective also says whether any rank has a gradient; a rank reads that only if it has none itself. Norms count
these parameters once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dsjob.optim.shards import local
from dsjob.parallel.pairs import HOST, Pair, Pairs
from dsjob.ranks.mesh import World


class Unsharded(Pairs):
    """The trained ones: fp32 masters, and gradients that accumulate in fp32 until they are reduced."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        host: Container[str],
        mesh: DeviceMesh,
        world: World,
        dtype: torch.dtype,
    ) -> None:
        """Casts `parameters` to `dtype`, in place. host: names of parameters whose masters are on the host."""
        self._world = world
        pairs = {}
        for name, parameter in parameters.items():
            placed = DTensor.from_local(parameter.data.float(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            on_host = name in host
            pairs[name] = Pair(parameter, nn.Parameter(placed.to(HOST) if on_host else placed), on_host)
            parameter.data = parameter.data.to(dtype)
        super().__init__(pairs)
        self.stream(lambda: True)

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the accumulated gradients over the ranks, and adds them to those of the masters. A collective."""
        pairs = list(self._pairs.values())
        if not pairs:
            return
        for pair in pairs:
            self._take(pair)
        device = self._world.device
        own = [
            pair.taken if pair.taken is not None else torch.zeros(pair.master.shape, device=device) for pair in pairs
        ]
        used = [torch.full((1,), float(pair.taken is not None), device=device) for pair in pairs]
        # fp32 [elements of all + one flag per parameter]: a single collective for both. A flag above 0 afterwards means
        # that some rank has a gradient.
        sent = torch.cat([*(gradient.reshape(-1) for gradient in own), *used]).div_(self._world.data_size)
        dist.all_reduce(sent, group=self._world.data_group)
        *means, use = torch.split_with_sizes(sent, [*(gradient.numel() for gradient in own), len(pairs)])
        for number, (pair, mean) in enumerate(zip(pairs, means, strict=True)):
            known = pair.taken is not None or pair.master.grad is not None
            pair.taken = None
            # Only if this rank has no gradient does the host read (and wait for) whether another rank has one.
            if not known and not float(use[number]):
                continue
            if pair.master.grad is None:
                pair.master.grad = torch.zeros_like(pair.master)
            part = local(pair.master.grad)
            part.add_(mean.view_as(part).to(part.device))

    def own_gradient(self, name: str) -> Tensor | None:
        """A parameter's unreduced gradient: fp32, with its shape."""
        return self._pairs[name].taken if name in self._pairs else None

    def _take(self, pair: Pair) -> None:
        """Adds the gradient of a backward pass to the unreduced one."""
        gradient = pair.parameter.grad
        pair.parameter.grad = None
        if gradient is not None:
            gradient = gradient.detach().float()
            pair.taken = gradient if pair.taken is None else pair.taken.add_(gradient.to(pair.taken.device))
