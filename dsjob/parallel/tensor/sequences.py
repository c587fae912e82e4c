"""Sequence parallelism along the ranks that divide layers: between these layers, each rank has a part of the sequence.

The first block takes its part of the activations, the last one gathers them. In between, norms, dropout and sums
compute on parts. A module that holds divided layers gathers its input, and adds up parts of its output. This sends as
many bytes as without it, and saves the memory of what is between divided layers. Whole parameters of the blocks, such
as norms, see only a part of the sequence, so that the ranks add up their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.errors import UsageError
from dsjob.parallel.tensor import regions
from dsjob.parallel.tensor.streams import Streams
from dsjob.ranks.mesh import Ranks

DIM = 1  # of activations [batch, sequence, features]


class Sequences:
    """Whether activations between divided layers are parts, which the first block decides in each pass.

    Passes without gradients, such as those that generate single tokens, may have lengths that do not divide.
    """

    def __init__(self, ranks: Ranks, streams: Streams | None) -> None:
        self.ranks, self._streams = ranks, streams
        self.divided = False

    def begin(self, x: Tensor) -> Tensor:
        """The part of the activations that this rank goes on with. Raises UsageError."""
        length = x.shape[DIM]
        self.divided = length % self.ranks.size == 0
        if not self.divided:
            if torch.is_grad_enabled():
                raise UsageError(
                    f"tensor_parallel.sequence_parallel: a sequence of {length} does not divide among {self.ranks.size}"
                    " ranks",
                    hint=f"pad sequences to a multiple of {self.ranks.size}",
                )
            return x
        if self._streams is not None and torch.is_grad_enabled():
            self._streams.enter("sequences", again=True)
        return regions.take_part(x, DIM, self.ranks)

    def end(self, x: Tensor) -> Tensor:
        """The activations of the whole sequence."""
        if not self.divided:
            return x
        if self._streams is not None:
            self._streams.leave()
        return regions.gather(x, DIM, x.shape[DIM] * self.ranks.size, self.ranks)

    def gather(self, x: Tensor) -> Tensor:
        """The input of divided layers: of the whole sequence."""
        if not self.divided:
            return regions.enter(x, self.ranks)
        return regions.gather_and_enter(x, DIM, x.shape[DIM] * self.ranks.size, self.ranks)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have computed, for the part of the sequence that this rank goes on with."""
        return regions.add_up_parts(x, DIM, self.ranks) if self.divided else regions.add_up(x, self.ranks)


def divide_sequences(
    model: nn.Module, blocks: Sequence[nn.Module], divided: Mapping[str, nn.Module], sequences: Sequences
) -> set[str]:
    """Lets the blocks of a model compute on parts of sequences. divided: its divided layers by name.

    Returns the names of layers whose inputs are gathered by the module around them. Raises UsageError for a model
    without blocks, or with several stacks of them.
    """
    require_one_stack(model, blocks, "tensor_parallel.sequence_parallel")
    names = {id(module): name for name, module in model.named_modules()}
    change_input(blocks[0], sequences.begin)
    blocks[-1].register_forward_hook(lambda module, args, output: change_first(output, sequences.end))
    modules = dict(model.named_modules())
    inside = set[str]()
    owners = {name.rpartition(".")[0] for name in divided} - {names[id(block)] for block in blocks}
    for owner in sorted(owners):
        change_input(modules[owner], sequences.gather)
        inside |= {name for name in divided if name.rpartition(".")[0] == owner}
    return inside


def require_one_stack(model: nn.Module, blocks: Sequence[nn.Module], key: str) -> None:
    """Raises UsageError, about `key`, unless a model has repeated blocks, all of them in one list."""
    names = {id(module): name for name, module in model.named_modules()}
    stacks = {names[id(block)].rpartition(".")[0] for block in blocks}
    if len(stacks) != 1:
        found = f"several stacks of blocks: {', '.join(sorted(stacks))}" if stacks else "no repeated blocks"
        raise UsageError(
            f"{key}: {type(model).__name__} has {found}", hint="it needs one stack of blocks; leave it out"
        )


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the activations that a module is called with: the first tensor of three dimensions."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for number, value in enumerate(args):
            if _is_activation(value):
                return (*args[:number], change(value), *args[number + 1 :]), kwargs
        for name, value in kwargs.items():
            if _is_activation(value):
                return args, {**kwargs, name: change(value)}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def change_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes a block's output: a tensor, or the first element of a tuple."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)
