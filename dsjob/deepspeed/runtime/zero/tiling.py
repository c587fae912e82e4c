"""`deepspeed.runtime.zero.tiling`: linear layers in tiles, which stage 3 gathers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dsjob.compute.find_blocks import mark_unit
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.utils import partition_uniform
from dsjob.errors import UsageError
from dsjob.parallel.zero import GatheredParameters


class TilingError(UsageError, RuntimeError):
    """A number of tiles that a layer does not have room for; a RuntimeError, as DeepSpeed documents."""


class TiledLinear(nn.Module):
    """A linear layer that is divided into `in_splits` x `out_splits` tiles, each a layer of its own.

    At stage 3, each tile is a unit: only the one in use, and the next, are gathered, so a layer may be larger than a
    GPU's memory. bias: the last tile of each row has it. input_is_already_split: inputs are a sequence of `in_splits`
    tensors. combine_out_splits: False returns a list of `out_splits` tensors. linear_cls: of the tiles, called with
    `others` too. init_linear: whose weights to copy. Raises TilingError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        for what, splits, size in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= size:
                raise TilingError(f"{what}_splits is {splits}", hint=f"use 1 to {what}_features, which is {size}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList()
        for row in range(out_splits):
            height, tiles = self.out_parts[row + 1] - self.out_parts[row], nn.ModuleList()
            for column in range(in_splits):
                width, last = self.in_parts[column + 1] - self.in_parts[column], column == in_splits - 1
                tiles.append(linear_cls(width, height, bias=bias and last, **others))
                mark_unit(tiles[-1])
            self.linears.append(tiles)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def _tiles(self, row: int) -> list[nn.Module]:
        return list(cast(nn.ModuleList, self.linears[row]))

    def forward(self, input_: Any) -> Any:
        """The layer's outputs."""
        given: Sequence[Tensor] = input_ if self.input_is_already_split and self.in_splits > 1 else self._cut(input_)
        if len(given) != self.in_splits:
            raise UsageError(f"TiledLinear got {len(given)} inputs", hint=f"pass in_splits tensors: {self.in_splits}")
        outputs = []
        for row in range(self.out_splits):
            total = None
            for tile, x in zip(self._tiles(row), given, strict=True):
                total = self._add(total, tile(x))
            outputs.append(total)
        return self._join(outputs) if self.combine_out_splits else outputs

    def _cut(self, x: Tensor) -> Sequence[Tensor]:
        sizes = [stop - start for start, stop in zip(self.in_parts, self.in_parts[1:], strict=False)]
        return torch.split(x, sizes, dim=-1)

    def _add(self, total: Any, output: Any) -> Any:
        """The sum of the outputs of a row's tiles."""
        return output if total is None else total + output

    def _join(self, outputs: list[Any]) -> Any:
        """The outputs of all rows side by side."""
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies the weights of a whole layer. A collective, if they are sharded: rank 0's count. Raises UsageError."""
        if other.weight.shape != (self.out_features, self.in_features) or (other.bias is not None) != self.use_bias:
            mine = f"[{self.out_features}, {self.in_features}], {'with' if self.use_bias else 'without'} bias"
            raise UsageError(f"TiledLinear: the other layer has another shape or bias than {mine}")
        for row in range(self.out_splits):
            rows = slice(self.out_parts[row], self.out_parts[row + 1])
            for column, tile in enumerate(self._tiles(row)):
                columns = slice(self.in_parts[column], self.in_parts[column + 1])
                weight, bias = cast(Tensor, tile.weight), cast("Tensor | None", tile.bias)
                with GatheredParameters([weight, bias], modifier_rank=0):
                    weight.copy_(other.weight[rows, columns])
                    if bias is not None:
                        bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """The same for a `linear_cls` that returns its output and its bias, which is not added."""

    def _add(self, total: Any, output: Any) -> Any:
        outputs, bias = output
        if total is None:
            return outputs, bias
        return total[0] + outputs, bias if bias is not None else total[1]

    def _join(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._join([output for output, _ in outputs]), super()._join(biases) if biases else None


__getattr__ = _explain_names(__name__)
