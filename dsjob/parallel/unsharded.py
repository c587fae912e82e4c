"""Parameters that cannot be sharded, in a model that is: those without dimensions, and empty ones.

Every rank has them whole. Their masters are replicated tensors of the mesh, so that an optimizer sees one kind of
tensor; gradients are averaged over the ranks by one small collective.

The collective also carries who has a gradient; a rank asks for that only if it has none itself. Norms count these
parameters once.
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
    """The trained ones among them: fp32 masters, and gradients that are added up in fp32 until they are reduced."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        host: Container[str],
        mesh: DeviceMesh,
        world: World,
        dtype: torch.dtype,
    ) -> None:
        """Casts `parameters` to `dtype`, in place. `host`: names of those whose masters are on the host."""
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
        """Adds the mean over the ranks of what each has added up to the masters' gradients. A collective."""
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
        sent = torch.cat([*(gradient.reshape(-1) for gradient in own), *used]).div_(self._world.data_size)
        dist.all_reduce(sent, group=self._world.data_group)
        *means, use = torch.split_with_sizes(sent, [*(gradient.numel() for gradient in own), len(pairs)])
        for number, (pair, mean) in enumerate(zip(pairs, means, strict=True)):
            known = pair.taken is not None or pair.master.grad is not None
            pair.taken = None
            # Only where this rank has no gradient does the host ask, and wait to hear, whether another one has.
            if not known and not float(use[number]):
                continue
            if pair.master.grad is None:
                pair.master.grad = torch.zeros_like(pair.master)
            part = local(pair.master.grad)
            part.add_(mean.view_as(part).to(part.device))

    def own_gradient(self, name: str) -> Tensor | None:
        """What is to be reduced yet of a parameter's gradient: fp32, of its shape."""
        return self._pairs[name].taken if name in self._pairs else None

    def _take(self, pair: Pair) -> None:
        """Adds a gradient that a backward pass has left to what is to be reduced."""
        gradient = pair.parameter.grad
        pair.parameter.grad = None
        if gradient is not None:
            gradient = gradient.detach().float()
            pair.taken = gradient if pair.taken is None else pair.taken.add_(gradient.to(pair.taken.device))
