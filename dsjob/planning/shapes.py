"""The shape of a model of which only the number of parameters is known: that of the Llama whose size is closest.

Shapes matter: what a rank gathers and reduces at a time depends on the blocks, and on what is outside of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsjob.planning.model import Model, Weight

_VOCABULARY = 128_256


@dataclass(frozen=True, slots=True)
class Llama:
    """A published model. `inner`: features of the MLP; `keys`: features of all keys of a token; `tied`: the head is the
    embedding."""

    name: str
    blocks: int
    hidden: int
    inner: int
    keys: int
    tied: bool = False

    @property
    def block(self) -> list[int]:
        """The elements of each parameter of a block: queries, keys, values, output, MLP, norms."""
        wide, hidden = self.hidden * self.inner, self.hidden
        return [hidden**2, hidden * self.keys, hidden * self.keys, hidden**2, wide, wide, wide, hidden, hidden]

    @property
    def rest(self) -> list[int]:
        """The elements of each parameter outside the blocks: embedding, head, norm."""
        embedding = _VOCABULARY * self.hidden
        return [*[embedding] * (1 if self.tied else 2), self.hidden]

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return self.blocks * sum(self.block) + sum(self.rest)


LLAMAS = (
    Llama("Llama 3.2 1B", 16, 2048, 8192, 512, tied=True),
    Llama("Llama 3.2 3B", 28, 3072, 8192, 1024, tied=True),
    Llama("Llama 3.1 8B", 32, 4096, 14336, 1024),
    Llama("Llama 3.1 70B", 80, 8192, 28672, 1024),
    Llama("Llama 3.1 405B", 126, 16384, 53248, 1024),
)


def assume_model(parameters: int, *, stages: int = 1, tensor: int = 1) -> Model:
    """A model with so many parameters in the proportions of a Llama; or what one of `stages` holds of it, the first,
    with the embedding, if layers are divided into `tensor` parts. Models divide evenly."""
    nearest = min(LLAMAS, key=lambda llama: abs(math.log(llama.elements / parameters)))
    scale = parameters / nearest.elements / tensor
    elements = -(-parameters // (stages * tensor))
    outside = nearest.rest if stages == 1 else nearest.rest[:1]
    rest = min(round(scale * sum(outside)), elements)
    blocks = max(round((elements - rest) / (scale * sum(nearest.block))), 1)
    each = (elements - rest) // blocks
    weights = _divide(elements - blocks * each, outside, 0)
    for number in range(1, blocks + 1):
        weights += _divide(each, nearest.block, number)
    return Model(tuple(weights), assumed=nearest.name)


def _divide(elements: int, proportions: Sequence[int], unit: int) -> list[Weight]:
    sizes = [elements * each // sum(proportions) for each in proportions]
    sizes[0] += elements - sum(sizes)
    return [Weight((size,), unit=unit) for size in sizes if size]
