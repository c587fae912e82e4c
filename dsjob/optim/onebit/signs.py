"""A mean over ranks of which signs alone travel: one bit an element in both directions, and a scale a chunk.

What the signs leave out is kept by who left it out and added the next time (error feedback), so that over several
means nothing is lost. Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), section 4; on torch.distributed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dsjob.optim.onebit.own_gradients import count_ranks

_BITS = 8  # in a byte; the first element is the lowest bit


def chunk_width(elements: int, ranks: int) -> int:
    """Elements of a tensor that each rank averages: whole bytes of signs, so that the last chunks may be padded."""
    return math.ceil(elements / (_BITS * ranks)) * _BITS


def average_signs(
    values: Sequence[Tensor],
    live: Sequence[Tensor],
    worker_errors: Sequence[Tensor],
    server_errors: Sequence[Tensor],
    *,
    one_scale: bool = False,
) -> list[Tensor]:
    """About the mean over all ranks of each of `values` (fp32, the same shapes everywhere); the same on every rank.

    Each tensor is cut into a chunk a rank. In the first phase a rank sends sign(x + worker error) of each chunk to the
    rank that averages it, with one scale, |x + error| / sqrt(elements), for the tensor. In the second that rank sends
    the mean in the same form, with its own error and a scale for the chunk. Elements that are not `live` (bool, of the
    shapes of `values`) are zero, and count in no scale. The sign of 0 is +1.

    `worker_errors`: [ranks, chunk_width], `server_errors`: [chunk_width], of each tensor; both are replaced in place.
    `one_scale`: all tensors share their scales, as parts of one.
    """
    ranks = count_ranks()
    widths = [chunk_width(value.numel(), ranks) for value in values]
    spans = [sum(widths)] if one_scale else widths
    # [ranks, sum(widths)], row r is what rank r averages; 0 or 1.
    alive = _cut([mask.float() for mask in live], widths, ranks)
    # What earlier rounds left out joins this one: without it the signs would be biased.
    sent = (_cut(values, widths, ranks) + torch.cat(list(worker_errors), 1)) * alive
    signs, scales, errors = _reduce_to_signs(sent, alive, spans)
    torch._foreach_copy_(list(worker_errors), list(torch.split_with_sizes(errors, widths, 1)))

    # uint8 [ranks, bytes of signs + 4 x scales]: scales travel in the same message, which saves a collective.
    message = torch.cat([_pack(signs), scales.view(torch.uint8).expand(ranks, -1)], 1)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message)
    own = alive[dist.get_rank()]
    # [sum(widths)]: the rows that all ranks have sent about this rank's chunk.
    mean = (_read(received, spans).sum(0) / ranks + torch.cat(list(server_errors))) * own
    signs, scales, errors = _reduce_to_signs(mean[None], own[None], spans)
    torch._foreach_copy_(list(server_errors), list(torch.split_with_sizes(errors[0], widths)))

    message = torch.cat([_pack(signs[0]), scales.view(torch.uint8)])
    received = message.new_empty(ranks, message.numel())
    dist.all_gather(list(received), message)
    # The signs of padding and of elements that are not live stand for values; `alive` makes them 0 again.
    means = torch.split_with_sizes(_read(received, spans) * alive, widths, 1)
    return [mean.reshape(-1)[: value.numel()].view_as(value) for mean, value in zip(means, values, strict=True)]


def _cut(tensors: Sequence[Tensor], widths: Sequence[int], ranks: int) -> Tensor:
    """Chunk by chunk, those of all tensors side by side: fp32 [ranks, sum(widths)], padded with zeros."""
    rows = [
        pad(tensor.reshape(-1).float(), (0, ranks * width - tensor.numel())).view(ranks, width)
        for tensor, width in zip(tensors, widths, strict=True)
    ]
    return torch.cat(rows, 1)


def _reduce_to_signs(rows: Tensor, alive: Tensor, spans: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each element is positive, a scale for each span of columns (fp32), and what these two leave out."""
    norms = torch.stack(torch._foreach_norm(list(torch.split_with_sizes(rows, spans, 1))))
    counts = torch.stack([part.sum() for part in torch.split_with_sizes(alive, spans, 1)])
    scales = norms / counts.clamp(min=1).sqrt()
    signs = rows >= 0
    wide = _widen(scales, spans)
    return signs, scales, (rows - torch.where(signs, wide, -wide)) * alive


def _read(messages: Tensor, spans: Sequence[int]) -> Tensor:
    """What the rows of `messages` stand for: fp32 [rows, sum(spans)]."""
    size = sum(spans) // _BITS
    scales = messages[:, size:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    wide = _widen(scales, spans)
    return torch.where(_unpack(messages[:, :size]), wide, -wide)


def _widen(scales: Tensor, spans: Sequence[int]) -> Tensor:
    """Scales of spans, [..., len(spans)], as those of their columns."""
    counts = torch.tensor(spans, device=scales.device)
    return scales.repeat_interleave(counts, -1, output_size=sum(spans))


def _pack(signs: Tensor) -> Tensor:
    """Bools [..., n] as bits, uint8 [..., n / 8]."""
    places = torch.arange(_BITS, dtype=torch.uint8, device=signs.device)
    bits = signs.view(*signs.shape[:-1], -1, _BITS).to(torch.uint8) << places
    return bits.sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    """The bools that `_pack` was given."""
    places = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> places) & 1).flatten(-2).bool()
