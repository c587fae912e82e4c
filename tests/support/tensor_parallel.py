"""A small tensor-parallel network, by hand, and the unit that says which ranks hold it together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dsjob import ModelParallelUnit

WIDTH, HIDDEN, SIZE = 6, 8, 2  # ranks that hold one model: SIZE


class Unit:
    """Neighbouring ranks hold one model; those with the same place in it train on other data. Megatron's spelling."""

    reads = 0  # the rank of each model that reads data, where one does

    def __init__(self, size: int = SIZE) -> None:
        ranks = range(dist.get_world_size())
        models = [list(ranks[first : first + size]) for first in ranks[::size]]
        self._model = dist.new_subgroups_by_enumeration(models)[0]
        self._data = dist.new_subgroups_by_enumeration([list(group) for group in zip(*models, strict=True)])[0]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)


class DeepSpeedUnit(Unit):
    """The same in DeepSpeed's spelling."""

    get_model_parallel_group = Unit.get_tensor_model_parallel_group
    get_model_parallel_rank = Unit.get_tensor_model_parallel_rank
    get_model_parallel_world_size = Unit.get_tensor_model_parallel_world_size


class _Enter(torch.autograd.Function):
    """What all ranks have goes into the parts; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Leave(torch.autograd.Function):
    """What the parts give is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    """A norm, a column-parallel and a row-parallel linear layer; whole without a group."""

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.column = nn.Linear(WIDTH, HIDDEN // size)
        self.row = nn.Linear(HIDDEN // size, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        y = self.norm(x)
        y = _Enter.apply(y, self.group) if self.group is not None else y
        y = self.row(torch.tanh(self.column(y)))
        y = _Leave.apply(y, self.group) if self.group is not None else y
        return x + y + self.bias


class ParallelNet(nn.Module):
    """Blocks between two linear layers that every rank has whole; gives the mean squared error."""

    def __init__(self, group: dist.ProcessGroup | None = None, size: int = 1) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(group, size) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)
        if group is not None:
            for name, parameter in self.named_parameters():
                if find_dim(name) is not None:
                    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - y).square().mean()


def find_dim(name: str) -> int | None:
    """The dimension that a parameter is cut along; None for one that every rank has whole."""
    return 0 if ".column." in name else 1 if name.endswith(".row.weight") else None


def build_whole() -> ParallelNet:
    """The network on one rank."""
    torch.manual_seed(3)
    return ParallelNet()


@torch.no_grad()
def build_part(unit: Unit) -> ParallelNet:
    """This rank's part of what `build_whole` gives."""
    rank, size = unit.get_tensor_model_parallel_rank(), unit.get_tensor_model_parallel_world_size()
    net = ParallelNet(unit.get_tensor_model_parallel_group(), size)
    whole = dict(build_whole().named_parameters())
    for name, parameter in net.named_parameters():
        dim = find_dim(name)
        parameter.copy_(whole[name] if dim is None else whole[name].chunk(size, dim)[rank])
    return net


def put_together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole network's parameters from those of the model-parallel ranks, in order."""
    dims = {name: find_dim(name) for name in parts[0]}
    return {n: parts[0][n] if d is None else torch.cat([p[n] for p in parts], d) for n, d in dims.items()}


def make_rows(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one global batch, the same for every caller."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)


class Rows:
    """Samples of a job; notes that it was built."""

    built = 0

    def __init__(self, length: int = 40, seed: int = 0) -> None:
        type(self).built += 1
        self.x, self.y = make_rows(seed, length)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Ids(Rows):
    """Inputs are rows of ids."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return (10 * x).long(), y


class Uneven(Rows):
    """Longer on the second rank of each model."""

    def __init__(self, length: int) -> None:
        super().__init__(length + 8 * (dist.get_rank() % SIZE))


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __iter__(self) -> Iterator[Any]:
        rows = Rows()
        yield from (rows[index] for index in range(len(rows)))


_made: list[Unit] = []  # by the job that runs here


def make_mpu() -> Unit:
    """A job's unit, with methods."""
    _made[:] = [DeepSpeedUnit()]
    return _made[0]


def make_fields(spelling: str = "should_build_dataloader", form: str = "object", reads: int = 0) -> Any:
    """A job's unit in Determined's form: rank `reads` of a model reads data, the last one reports."""
    rank, size = dist.get_rank(), dist.get_world_size()
    fields = {"data_parallel_rank": rank // SIZE, "data_parallel_world_size": size // SIZE}
    fields |= {"should_report_metrics": rank % SIZE == SIZE - 1, spelling: rank % SIZE == reads}
    _made[:] = [Unit()]
    _made[0].reads = reads
    return fields if form == "dict" else SimpleNamespace(**fields) if form == "plain" else ModelParallelUnit(**fields)


def build_own_part() -> ParallelNet:
    """The part of the rank, as the job's unit says."""
    return build_part(_made[0])


def _give(batch: Any) -> Any:
    """The batch that one rank of the model has read; floats."""
    group, reads = _made[0].get_tensor_model_parallel_group(), _made[0].reads
    sent = [batch]
    assert (batch is None) == (dist.get_rank(group) != reads)
    dist.broadcast_object_list(sent, group=group, group_src=reads)
    return [part.float() for part in sent[0]]


def train_on_given(engines: Mapping[str, Any], batch: Any) -> Any:
    """A step whose batch one rank of the model alone has, and whose loss another one tells."""
    (engine,) = engines.values()
    loss = engine(*_give(batch))
    engine.backward(loss)
    engine.step()
    return {"loss": loss, "double": 2 * loss} if engine.world.reports else None


def tell_loss(outputs: Any, batch: Any) -> Tensor:
    """A metric that is the loss again."""
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs["loss"]
    return loss


def count_all(values: list[Any]) -> int:
    """How many batches a metric has seen."""
    return len(values)


def evaluate_given(engines: Mapping[str, Any], batch: Any) -> Any:
    """The same for evaluation."""
    (engine,) = engines.values()
    loss = engine(*_give(batch))
    return {"loss": loss} if engine.world.reports else {}
