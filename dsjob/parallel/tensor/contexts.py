"""Context parallelism: ranks compute the blocks of a model on parts of the same sequences.

The first block takes this rank's part of the activations, the last one gathers them; what is outside the blocks sees
whole sequences on every rank. Only attention looks beyond a part: there, ranks exchange heads for sequences, and each
computes some heads over whole sequences, as DeepSpeed's Ulysses does. So masks of any kind hold as they are. (torch's
`context_parallel` passes keys and values around instead. It has no kernels for CPUs, and takes no masks.)

Passes without gradients compute whole sequences: a cache of keys and values has to be complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dsjob.compute.find_blocks import find_blocks
from dsjob.errors import UsageError
from dsjob.parallel.tensor import regions
from dsjob.parallel.tensor.sequences import DIM, change_first, change_input, require_one_stack
from dsjob.parallel.tensor.streams import Streams
from dsjob.ranks.mesh import Ranks
from dsjob.ranks.splits import cut
from dsjob.torch_private import tree_map_only

_HEADS, _PLACES = 1, 2  # dimensions of queries, keys and values: [batch, heads, sequence, features]


class Contexts:
    """The parts of sequences of the current pass."""

    def __init__(self, ranks: Ranks, streams: Streams | None) -> None:
        self.ranks, self._streams = ranks, streams
        self.divided, self.length = False, 0
        self.exchanged = 0  # calls of attention

    def begin(self, x: Tensor) -> Tensor:
        """The part of the activations that this rank goes on with. Raises UsageError."""
        self.divided, self.length = torch.is_grad_enabled(), x.shape[DIM]
        if not self.divided:
            return x
        if self.length % self.ranks.size:
            raise UsageError(
                f"context_parallel.size is {self.ranks.size}, which does not divide a sequence of {self.length}",
                hint=f"pad sequences to a multiple of {self.ranks.size}",
            )
        if self._streams is not None:
            self._streams.enter("context", again=True)
        return regions.take_part(x, DIM, self.ranks)

    def end(self, x: Tensor) -> Tensor:
        """The activations of the whole sequence."""
        if not self.divided:
            return x
        if self._streams is not None:
            self._streams.leave()
        if not self.exchanged:
            raise _refuse_attention("its blocks do not call scaled_dot_product_attention")
        return regions.gather(x, DIM, self.length, self.ranks)

    def take_part(self, value: Tensor) -> Tensor:
        """This rank's part of another input of a block that has one entry for each place of the sequence. Masks of
        booleans, [batch, queries, keys], stay whole."""
        if not self.divided or value.dim() != 3 or value.shape[DIM] != self.length or value.dtype == torch.bool:
            return value
        start, stop = cut(self.length, self.ranks.size, self.ranks.rank)
        return value.narrow(DIM, start, stop - start)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention over whole sequences, of this rank's heads. In and out: this rank's part, of all heads."""
        self.exchanged += 1
        size = self.ranks.size
        for part in (query, key):
            if part.dim() != 4 or part.shape[_PLACES] * size != self.length:
                raise _refuse_attention(
                    f"it is called with {list(part.shape)}, not with [batch, heads, {self.length // size}, features]",
                    f"each rank has {self.length // size} of {self.length} places; windows, cross attention and other"
                    " layouts cannot be divided",
                )
        heads = query.shape[_HEADS]
        if heads % size:
            raise UsageError(
                f"context_parallel.size is {size}, which does not divide {heads} heads of attention",
                hint=f"use a size that divides {heads}",
            )
        if key.shape[_HEADS] % size:  # fewer heads of keys than ranks
            key, value = (part.repeat_interleave(heads // part.shape[_HEADS], _HEADS) for part in (key, value))
        query, key, value = (_Exchange.apply(part, _HEADS, _PLACES, self.ranks) for part in (query, key, value))  # type: ignore[no-untyped-call]
        mask = args[0] if args else kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[_HEADS] == heads > 1:
            start, stop = cut(heads, size, self.ranks.rank)
            own = mask.narrow(_HEADS, start, stop - start)
            if args:
                args = (own, *args[1:])
            else:
                kwargs["attn_mask"] = own
        found = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return cast(Tensor, _Exchange.apply(found, _PLACES, _HEADS, self.ranks))  # type: ignore[no-untyped-call]


def _refuse_attention(
    reason: str, hint: str = "for models of transformers, set attn_implementation: sdpa"
) -> UsageError:
    return UsageError(
        f"context_parallel: the model's attention would see only a part of a sequence: {reason}", hint=hint
    )


class _Attention(TorchFunctionMode):
    """Replaces calls of `scaled_dot_product_attention`."""

    def __init__(self, contexts: Contexts) -> None:
        super().__init__()
        self._contexts = contexts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and self._contexts.divided:
            return self._contexts.attend(*args, **(kwargs or {}))  # the mode is off inside this method
        return function(*args, **(kwargs or {}))


class _Exchange(torch.autograd.Function):
    """All ranks' parts along `gathered` of this rank's share along `scattered`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scattered: int, gathered: int, ranks: Ranks) -> Tensor:
        ctx.how = gathered, scattered, ranks
        # [ranks, ...]: what each rank receives, then what each has sent.
        sent = torch.stack(x.chunk(ranks.size, scattered)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ranks.group)
        return torch.cat(received.unbind(0), gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradient, *ctx.how), None, None, None  # type: ignore[no-untyped-call]


def divide_contexts(model: nn.Module, ranks: Ranks, streams: Streams | None) -> tuple[Contexts, Sequence[nn.Module]]:
    """Lets the blocks of a model compute on parts of sequences, but for `Contexts.end`, which the caller registers.

    Call it before blocks are recomputed or compiled. Returns the blocks too. Raises UsageError.
    """
    contexts, blocks = Contexts(ranks, streams), find_blocks(model, sharing=True)
    require_one_stack(model, blocks, "context_parallel")
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen not in (None, "sdpa"):
        raise _refuse_attention(f"it computes it with {chosen}")
    change_input(blocks[0], contexts.begin)
    for block in blocks:
        block.register_forward_pre_hook(_make_taking(contexts), with_kwargs=True)
        block.forward = MethodType(_make_attending(contexts, type(block).forward), block)
    return contexts, blocks


def _make_taking(contexts: Contexts) -> Any:
    def take(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, contexts.take_part, (args, kwargs))

    return take


def _make_attending(contexts: Contexts, forward: Any) -> Any:
    # Around `forward`, not in hooks: recomputations call only that.
    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Attention(contexts):
            return forward(module, *args, **kwargs)

    return attend


def register_end(contexts: Contexts, blocks: Sequence[nn.Module]) -> None:
    """Gathers the sequences after the last block, and after what other hooks there have done."""
    blocks[-1].register_forward_hook(lambda module, args, output: change_first(output, contexts.end))
