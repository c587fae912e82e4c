"""Signs of fp32 numbers, eight to a byte, with what they leave out; for the 1-bit optimizers.

Numbers are rows of spans: fp32 [rows, sum(widths)], where each width is a multiple of 8. Each span of each row has a
scale: fp32 [rows, len(widths)]. A bit stands for scale or -scale. It is 1 where the number is >= 0; the first element
is the lowest bit.

Each function exists in C++, in CUDA and in PyTorch's operators. All give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsjob.ops.loading import load

_BITS = 8  # in a byte

torch.library.define(
    "dsjob::onebit_compress", "(Tensor rows, Tensor alive, Tensor scales, int[] widths) -> (Tensor, Tensor)"
)
torch.library.define("dsjob::onebit_expand", "(Tensor packed, Tensor scales, int[] widths) -> Tensor")


def find_problem(device: torch.device, *, build: bool) -> str:
    """Makes `native=True` possible for tensors on `device`. Returns why it is not, or nothing.

    build: also build the op for GPUs. Its kernels have not run on a GPU yet, so nothing builds it without being asked.
    """
    problem: str = load("onebit_cuda", build=build) if device.type == "cuda" else load("onebit")
    return problem


def compress(
    rows: Tensor, alive: Tensor, scales: Tensor, widths: Sequence[int], *, native: bool = False
) -> tuple[Tensor, Tensor]:
    """The packed signs, uint8 [rows, sum(widths) / 8], and the errors: number - what its bit stands for, or 0
    where the number is not alive.

    alive: bool, in the shape of `rows`. native: use the compiled op, which `find_problem` must have made possible.
    """
    if native:
        packed, errors = torch.ops.dsjob.onebit_compress(rows, alive, scales, widths)
        return packed, errors
    signs, wide = rows >= 0, _widen(scales, widths)
    places = torch.arange(_BITS, dtype=torch.uint8, device=rows.device)
    bits = signs.view(rows.shape[0], rows.shape[1] // _BITS, _BITS).to(torch.uint8) << places
    return bits.sum(-1, dtype=torch.uint8), torch.where(alive, rows - torch.where(signs, wide, -wide), 0)


def expand(packed: Tensor, scales: Tensor, widths: Sequence[int], *, native: bool = False) -> Tensor:
    """What packed signs stand for: fp32 [rows, sum(widths)]."""
    if native:
        values: Tensor = torch.ops.dsjob.onebit_expand(packed, scales, widths)
        return values
    places = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    signs, wide = ((packed[..., None] >> places) & 1).flatten(-2).bool(), _widen(scales, widths)
    return torch.where(signs, wide, -wide)


def _widen(scales: Tensor, widths: Sequence[int]) -> Tensor:
    """Repeats the scale of each span for its elements: [rows, sum(widths)]."""
    # `output_size` saves a wait for the device, which repeat_interleave would need to sum the counts.
    counts = torch.tensor(widths, device=scales.device, dtype=torch.int64)
    return scales.repeat_interleave(counts, -1, output_size=sum(widths))


def _fake_compress(rows: Tensor, alive: Tensor, scales: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    packed = rows.new_empty(rows.shape[0], rows.shape[1] // _BITS, dtype=torch.uint8)
    return packed, rows.new_empty(rows.shape)


def _fake_expand(packed: Tensor, scales: Tensor, widths: Sequence[int]) -> Tensor:
    return scales.new_empty(packed.shape[0], packed.shape[1] * _BITS)


torch.library.register_fake("dsjob::onebit_compress", _fake_compress)
torch.library.register_fake("dsjob::onebit_expand", _fake_expand)
