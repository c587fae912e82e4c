"""An approximate mean over ranks that communicates only signs: one bit per element each way, and a scale per chunk.

Error feedback: the rank that compresses a value keeps the compression error and adds it to the next value, so that
nothing is lost over several means. Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), section 4.
`dsjob.ops.onebit` packs the signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.ops.onebit import compress, expand
from dsjob.optim.onebit.own_gradients import count_ranks

_BITS = 8  # in a byte


def chunk_width(elements: int, ranks: int) -> int:
    """The number of elements of a tensor that each rank averages. A multiple of 8, so that their signs fill whole
    bytes; the last chunks may contain padding."""
    return math.ceil(elements / (_BITS * ranks)) * _BITS


def average_signs(
    values: Sequence[Tensor],
    live: Sequence[Tensor],
    worker_errors: Sequence[Tensor],
    server_errors: Sequence[Tensor],
    *,
    one_scale: bool = False,
    native: bool = False,
) -> list[Tensor]:
    """The approximate mean over all ranks of each tensor in `values` (fp32, equal shapes on all ranks). All ranks get
    the same result, bit for bit. A collective.

    Each tensor is split into one chunk per rank. In the first phase, every rank sends sign(x + worker error) of each
    chunk to the rank that averages this chunk, with one scale per tensor, |x + error| / sqrt(elements). In the second
    phase, that rank sends the mean to all ranks in the same form, with its server error and one scale per chunk.
    Elements that are not `live` (bool, in the shapes of `values`) are zero and do not affect scales. The sign of 0 is
    +1.

    `worker_errors`: [ranks, chunk_width] per tensor; `server_errors`: [chunk_width] per tensor; updated in place.
    `one_scale`: all tensors share their scales, as if they were one tensor. `native`: compress with the compiled op;
    the result is the same.
    """
    ranks = count_ranks()
    widths = [chunk_width(value.numel(), ranks) for value in values]
    spans = [sum(widths)] if one_scale else widths
    # bool [ranks, sum(widths)]; row r is the part that rank r averages.
    alive = _cut(live, widths, ranks)
    # Error feedback. Without it, the signs would be a biased estimate, and training may diverge.
    sent = torch.where(alive, _cut(values, widths, ranks).add_(torch.cat(list(worker_errors), 1)), 0)
    scales = _find_scales(sent, alive, spans)
    signs, errors = compress(sent, alive, scales.expand(ranks, -1), spans, native=native)
    # In place: these are tensors of the optimizer's state.
    torch._foreach_copy_(list(worker_errors), list(torch.split_with_sizes(errors, widths, 1)))

    # uint8 [ranks, bytes of signs + 4 x scales]: sending scales in the same message saves a collective.
    message = torch.cat([signs, scales.view(torch.uint8).expand(ranks, -1)], 1)
    received = torch.empty_like(message)
    # Row r of `message` goes to rank r. Row r of `received` comes from rank r, and is about this rank's chunk.
    dist.all_to_all_single(received, message)
    own = alive[dist.get_rank()]
    # [sum(widths)]: the mean of the rows that all ranks sent for this rank's chunks.
    mean = torch.where(own, _read(received, spans, native).sum(0).div_(ranks).add_(torch.cat(list(server_errors))), 0)
    scales = _find_scales(mean[None], own[None], spans)
    signs, errors = compress(mean[None], own[None], scales[None], spans, native=native)
    torch._foreach_copy_(list(server_errors), list(torch.split_with_sizes(errors[0], widths)))

    # Second phase: every rank sends the mean of its chunk to all, uint8 [bytes of signs + 4 x scales].
    message = torch.cat([signs[0], scales.view(torch.uint8)])
    received = message.new_empty(ranks, message.numel())
    dist.all_gather(list(received), message)
    # A sign cannot encode 0, so reset padding and elements that are not live.
    means = torch.split_with_sizes(torch.where(alive, _read(received, spans, native), 0), widths, 1)
    return [mean.reshape(-1)[: value.numel()].view_as(value) for mean, value in zip(means, values, strict=True)]


def _cut(tensors: Sequence[Tensor], widths: Sequence[int], ranks: int) -> Tensor:
    """The chunks of all tensors: [ranks, sum(widths)], padded with zeros. Row r has the r-th chunk of each."""
    cut = tensors[0].new_zeros(ranks, sum(widths))
    for tensor, part in zip(tensors, torch.split_with_sizes(cut, widths, 1), strict=True):
        flat, width = tensor.reshape(-1), part.shape[1]
        full = flat.numel() // max(width, 1)  # rows without padding; a tensor without elements has no columns
        part[:full].copy_(flat[: full * width].view(full, width))
        if full * width < flat.numel():
            part[full, : flat.numel() - full * width].copy_(flat[full * width :])
    return cut


def _find_scales(rows: Tensor, alive: Tensor, spans: Sequence[int]) -> Tensor:
    """One scale per span of columns, fp32 [spans]. It is a root mean square, so sign x scale has the norm of the
    original."""
    norms = torch.stack(torch._foreach_norm(list(torch.split_with_sizes(rows, spans, 1))))
    counts = torch.stack([part.count_nonzero() for part in torch.split_with_sizes(alive, spans, 1)])
    return norms / counts.clamp(min=1).sqrt()


def _read(messages: Tensor, spans: Sequence[int], native: bool) -> Tensor:
    """Decodes `messages`, uint8 [rows, bytes], into their values: fp32 [rows, sum(spans)]."""
    size = sum(spans) // _BITS
    # The copy is aligned and contiguous, as a view in another dtype requires.
    scales = messages[:, size:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    values: Tensor = expand(messages[:, :size], scales, spans, native=native)
    return values
