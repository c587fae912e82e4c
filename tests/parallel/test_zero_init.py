"""The initial values of models that zero.Init shards while they are built: those of the whole models, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import ADAMW
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsjob
from dsjob.parallel.presharded import ShardStatus
from dsjob.parallel.zero import GatheredParameters
from dsjob.parallel.zero_init import Init
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow


class Reset(nn.Module):
    """Initialises parameters of modules that it has built, as many constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.orthogonal_(self.layer.linear1.weight)
        nn.init.trunc_normal_(self.layer.linear2.weight, std=0.02)
        self.layer.norm1.weight.data.normal_(1, 0.1)
        self.layer.norm2.weight.data.fill_(3)


def build_bert() -> nn.Module:
    """transformers walks over the model in its own way, and clears the row of the padding token."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return transformers.BertModel(config)  # type: ignore[no-any-return]


def build(world: World, make: Callable[[], nn.Module], sharded: bool) -> dict[str, Tensor]:
    torch.manual_seed(world.data_rank if sharded else 0)  # rank 0's values count
    with Init(enabled=sharded):
        model = make()
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == sharded
        with GatheredParameters(parameter):
            found[name] = parameter.detach().clone()
    return found


@pytest.mark.parametrize("make", [Reset, build_bert])
def test_what_constructors_fill_is_what_they_fill_without_shards(make: Callable[[], nn.Module]) -> None:
    expected = run_ranks(build, 1, make, False)[0]
    for found in run_ranks(build, 2, make, True):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_on_one_rank_stage_3_has_the_attributes_that_programs_for_it_read() -> None:
    config = {"train_batch_size": 1, "optimizer": ADAMW, "zero_optimization": {"stage": 3}}
    parameter: Any = dsjob.initialize(model=nn.Linear(2, 3), config=config)[0].module.weight
    assert (parameter.ds_status, parameter.ds_shape) == (ShardStatus.NOT_AVAILABLE, parameter.shape)
    with GatheredParameters(parameter):
        assert parameter.ds_status == ShardStatus.AVAILABLE
