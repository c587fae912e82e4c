"""Presents this rank's part of a parameter that tensor parallelism divides as what it is of the whole parameter.

It has the whole parameter's shape. DCP asks it, by its protocol for objects of such a kind, for the boxes that this
rank holds: several if the parameter has sections, or is sharded over the data-parallel ranks too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dsjob.optim.shards import local
from dsjob.ranks.splits import Split


class SplitTensor:
    """`tensor`: this rank's part along `split`; a DTensor if it is sharded further."""

    def __init__(self, tensor: Tensor, split: Split) -> None:
        self.tensor, self._split = tensor, split
        self.shape, self.dtype, self.device = split.shape(tensor.shape), tensor.dtype, tensor.device

    def size(self) -> torch.Size:
        """The shape."""
        return self.shape

    @property
    def layout(self) -> Any:
        """What the boxes depend on, besides the shape."""
        sharded = (self.tensor.device_mesh, self.tensor.placements) if isinstance(self.tensor, DTensor) else None
        return self._split.dim, self._split.sections, self._split.ranks.rank, sharded

    def boxes(self) -> dict[tuple[int, ...], Tensor]:
        """What this rank holds, by the first index in the whole parameter. The tensors share memory with the part."""
        offsets = [0] * self.tensor.dim()
        if isinstance(self.tensor, DTensor):
            (chunk,) = self.tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            offsets = list(chunk.offsets)
        own = local(self.tensor).detach()
        found = {}
        for there, inside, sizes in self._split.boxes(offsets, own.shape):
            box = own
            for dim, (start, size) in enumerate(zip(inside, sizes, strict=True)):
                box = box.narrow(dim, start, size)
            found[tuple(there)] = box
        return found

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), box.shape),
                    properties=TensorProperties.create_from_tensor(box),
                    size=self.shape,
                ),
            )
            for offsets, box in self.boxes().items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes().items()]


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for tensors by name, some of which may be SplitTensors. The original drops these, and looks for
    boxes only in tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        if isinstance(found, SplitTensor) and index.offset is not None:
            return found.boxes()[tuple(index.offset)]
        return super().lookup_tensor(index)


def take_box(tensor: Tensor | SplitTensor, offsets: tuple[int, ...]) -> Tensor:
    """The box of a tensor that this rank holds and that begins at `offsets`."""
    return tensor.boxes()[offsets] if isinstance(tensor, SplitTensor) else local(tensor).detach()


def find_layout(tensor: Tensor | SplitTensor) -> Any:
    """What the plan of a save depends on, besides name, shape and dtype of a tensor."""
    if isinstance(tensor, SplitTensor):
        return tensor.layout
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
