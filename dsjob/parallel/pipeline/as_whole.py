"""A pipeline as one model that can be called: what `generate` of transformers, and loops like it, call token by token.

Each call is a forward pass through all stages. The last stage has the logits, and sends them to all ranks of the
pipeline, which go on with the same ones and draw the same random numbers. Nothing is kept from one call to the next: a
stage computes all tokens again for each new one.

If weights are sharded, each pass gathers them, which all data-parallel ranks must do together. So while it generates, a
pipeline whose texts have ended makes further passes until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dsjob.errors import ContractError
from dsjob.ranks.mesh import Ranks, World

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 6
Forward = Callable[..., Any]  # a pass through all stages: the model's output on the last one


class Logits(dict[str, Tensor]):
    """The outputs of a model in a pipeline: `logits`, by name and as an attribute."""

    @property
    def logits(self) -> Tensor:
        """The logits of the last stage."""
        return self["logits"]


def require_whole_passes(module: nn.Module) -> None:
    """Raises ContractError for a model that generates by calling parts of itself."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ContractError(
            f"{type(module).__name__} generates with its encoder once and its decoder for each token, but a pipeline"
            " can only run both together",
            hint="run `dsjob generate` on the checkpoint, which loads the whole model",
        )


def as_whole(module: nn.Module, world: World, forward: Forward) -> nn.Module:
    """An object of the class of `module`, a stage, that computes as the whole model when it is called: logits, equal on
    all ranks of the pipeline. All of them must make the same calls. Raises ContractError."""
    require_whole_passes(module)
    kind: Any = type(module)
    ranks = world.data if isinstance(module, FSDPModule) else Ranks()
    passes = _Passes(lambda *args, **kwargs: _share_logits(forward(*args, **kwargs), world), ranks, world.device)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return passes.run(*args, **kwargs)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `_Passes` does what `synced_gpus` asks for. Transformers' own way fails without a cache: for texts that have
        # ended, it extends the mask, but not the texts.
        of_transformers = getattr(module, "generation_config", None) is not None
        own = {"use_cache": False, "synced_gpus": False} if of_transformers else {}
        with passes.counted():
            return kind.generate(self, *args, **{**kwargs, **own})

    own: dict[str, Any] = {"__call__": call, **({"generate": generate} if hasattr(kind, "generate") else {})}
    made: nn.Module = object.__new__(type(kind.__name__, (kind,), own))
    # `forward` is that of the class, whose arguments `generate` looks at.
    made.__dict__.update({key: value for key, value in vars(module).items() if key != "forward"})
    return made


class _Passes:
    """Passes through all stages. ranks: each pass needs a pass of all of them."""

    def __init__(self, run: Forward, ranks: Ranks, device: torch.device) -> None:
        self._run, self._ranks, self._device = run, ranks, device
        self._counts = False
        self._first: tuple[Any, Any] | None = None  # what the first pass was called with

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._counts and self._ranks.size > 1:
            self._first = self._first or (args, kwargs)
            self._is_needed(True)
        return self._run(*args, **kwargs)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The block, and then as many passes as other ranks still need."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False
        if self._first is not None:
            while self._is_needed(False):
                self._run(*self._first[0], **self._first[1])

    def _is_needed(self, here: bool) -> bool:
        """Whether any rank needs another pass. here: this one does. A collective."""
        wanted = torch.tensor(int(here), device=self._device)
        dist.all_reduce(wanted, group=self._ranks.group)
        return bool(wanted)


def _share_logits(outputs: Any, world: World) -> Any:
    """The logits of the last stage: a tensor, or `Logits` if the model's output names them. A collective of the ranks
    that hold a copy of the model. Raises ContractError on all of them if there are none."""
    ranks = torch.tensor(world.order or range(world.everyone.size)).view(world.pipe.size, world.data_size, -1)
    source = int(ranks[-1, world.data_rank, 0])
    named = isinstance(outputs, Mapping) or hasattr(outputs, "logits")
    logits = outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
    logits = getattr(logits, "logits", logits)
    about = [-1] * (3 + _MOST_DIMS)  # named, dtype, dims, sizes
    if isinstance(logits, Tensor) and logits.dtype in _DTYPES and logits.dim() <= _MOST_DIMS:
        about[:3] = [int(named), _DTYPES.index(logits.dtype), logits.dim()]
        about[3 : 3 + logits.dim()] = logits.shape
    told = torch.tensor(about, device=world.device)
    dist.broadcast(told, src=source, group=world.model.group)
    by_name, dtype, dims, *sizes = told.tolist()
    if dims < 0:
        raise ContractError(
            "generation: in a pipeline, the model must return logits", hint="return a tensor, or a dict with `logits`"
        )
    last = world.pipe.rank == world.pipe.size - 1
    given = logits.contiguous() if last else torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=world.device)
    dist.broadcast(given, src=source, group=world.model.group)
    return Logits(logits=given) if by_name else given
