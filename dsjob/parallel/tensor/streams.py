"""Random numbers inside divided layers: each rank draws its own there, and the same as the others everywhere else.

The ranks along the `tensor` axis are seeded alike. Where a layer's output is divided, the generator is seeded with a
number that it has drawn, plus the rank; where the parts are added up again, it goes on where it was. So what a rank
draws is a function of the generator's state: nothing more needs to be saved in checkpoints, and recomputed activations
draw the same again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dsjob.torch_private import FakeTensor

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FAR = 0x9E3779B97F4A7C15  # an odd number: the seeds of neighbouring ranks differ in many bits


def draws(model: nn.Module) -> bool:
    """Whether a model drops activations when it trains: a module has a rate above 0, under any name with `drop`."""
    for module in model.modules():
        values = dict(vars(module))
        if isinstance(module, _DROPOUTS):
            values["drop"] = module.p
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in values.items()):
            return True
    return False


class Streams:
    """Switches the generator of `device` at the borders of divided layers."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._inside: str | None = None  # the module whose divided layers run
        self._outside: Tensor | None = None  # the generator's state to go on with

    def enter(self, owner: str, *, again: bool = False) -> None:
        """From here on, until `leave`, numbers are this rank's own. owner: the name of the module around the layers.

        A recomputation may end before it leaves. The generator is then set back by others, and the next module enters.
        again: enter in any case.
        """
        if self._inside == owner and not again:
            return
        generator = self._find()
        if generator.device.type == "cuda":
            # Without a wait for the device: a number from its seed and offset, both known to the host.
            offset = generator.get_offset()
            seed = hash((generator.initial_seed(), offset))
            generator.set_offset(offset + 4)
        else:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
            if isinstance(drawn, FakeTensor):  # a plan: nothing has values
                return
            seed = int(drawn)
        self._inside, self._outside = owner, generator.get_state()
        generator.manual_seed((seed + (self._rank + 1) * _FAR) % (1 << 63))

    def leave(self) -> None:
        """Numbers are those of all ranks again."""
        if self._inside is not None and self._outside is not None:
            self._find().set_state(self._outside)
        self._inside = self._outside = None

    def _find(self) -> Any:
        if self._device.type != "cuda":
            return torch.default_generator
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
