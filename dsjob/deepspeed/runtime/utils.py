"""`deepspeed.runtime.utils`: the functions that programs use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.utils import logger
from dsjob.pipelines.partition import balance
from dsjob.ranks.seeding import seed_rng
from dsjob.torch_private import tree_map


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, logs the current and the peak memory of tensors on the GPU, in GiB."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB on the device, at most %.2f GiB", message, now, most)


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, on all devices."""
    seed_rng(seed)


def clip_grad_norm_(parameters: object, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """torch's function, for a program's own optimizers. Engines clip according to `gradient_clipping`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[arg-type]


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on a device: a tensor, or lists, tuples and dicts with tensors at any depth.

    criterion_func: says which tensors are moved; by default all.
    """

    def move(value: Any) -> Any:
        moves = isinstance(value, torch.Tensor) and (criterion_func is None or criterion_func(value))
        return value.to(device) if moves else value

    return tree_map(move, item)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cuts a sequence into runs so that the largest sum of weights is as small as possible: the first index of each
    run, and the length. The last runs are empty if there are fewer items than parts."""
    parts = min(len(weights), num_parts)
    return [*balance(weights, parts), *[len(weights)] * (num_parts - parts)]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The same for runs that are equally long, as far as possible; the first ones are longer."""
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sums of the first item, the first two, and so on."""
    return list(accumulate(weights))


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """A call as text, such as `f(1, key=2)`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value}' for key, value in kwargs.items())])})"


class PartitionedTensor:
    """One tensor of the ranks of a group, of which each keeps a part: a range of the elements in order."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, partition_meta: object = None) -> None:
        """tensor: the same on every rank. partition_meta: has no effect."""
        self.group, self.rank = group, dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), dist.get_world_size(group))
        start, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: dist.ProcessGroup, device: torch.device | None = None
    ) -> PartitionedTensor:
        """From what `to_meta` gave, and this rank's part."""
        made, numbers = cls.__new__(cls), meta.tolist()
        made.group, made.rank, made.local_data = group, dist.get_rank(group), local_part.detach()
        made.orig_size = numbers[1 : 1 + numbers[0]]
        made.orig_device = local_part.device if device is None else torch.device(device)
        made.partition = numbers[3 + numbers[0] :]
        return made

    def full(self, device: torch.device | None = None) -> torch.Tensor:
        """The whole tensor; a collective."""
        sizes = [end - start for start, end in pairwise(self.partition)]
        padded = self.local_data.new_zeros(max(sizes))
        padded[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> torch.Tensor:
        """Everything but the data, as int64: the number of dims, the shape, the number of parts, this rank, where the
        parts begin, and the number of elements."""
        numbers = [len(self.orig_size), *self.orig_size, len(self.partition) - 1, self.rank, *self.partition]
        return torch.tensor(numbers, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """This rank's part: [elements]."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's part."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """The shape of the whole tensor."""
        return self.orig_size


__getattr__ = _explain_names(__name__)
