"""Which parts of a model are sharded as units, without a word from the model."""

import pytest
import torch
from net import Net
from torch import nn

from dsjob.compute.find_blocks import find_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
        )


class Fused(nn.Module):
    """Several layers in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))


class Model(nn.Module):
    def __init__(self, blocks: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(3, 2), blocks, head or nn.Linear(2, 3)


def test_blocks_of_a_list_are_units_and_their_parts_are_not() -> None:
    net = Net()
    assert find_blocks(net) == list(net.blocks)
    model = Model(nn.ModuleList([Block(), Block()]))
    assert find_blocks(model) == list(model.blocks.children())
    assert len(find_blocks(Model(nn.ModuleList([Fused(), Fused()])))) == 2


def test_lists_inside_modules_are_found_in_order() -> None:
    model = Model(Model(nn.ModuleList([Block(), Block()])), Model(nn.ModuleDict({"a": Block(), "b": Block()})))
    assert [type(block) for block in find_blocks(model)] == [Block] * 4


@pytest.mark.parametrize(
    "blocks",
    [
        nn.ModuleList([Block()]),  # nothing repeats
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),  # layers, not blocks made of parts
        nn.ModuleList([nn.LSTM(2, 2, num_layers=2), nn.LSTM(2, 2, num_layers=2)]),
        nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]),  # nothing to shard
    ],
)
def test_what_is_no_repeated_block_stays_with_the_rest(blocks: nn.Module) -> None:
    assert find_blocks(Model(blocks)) == []


def test_a_block_used_twice_or_sharing_a_weight_stays_with_the_rest() -> None:
    twice = Block()
    assert find_blocks(Model(nn.ModuleList([twice, twice]))) == []
    first, second, third = Block(), Block(), Block()
    head = nn.Linear(2, 2)
    head.weight = second.parts[0][0].weight  # type: ignore[index,assignment]
    assert find_blocks(Model(nn.ModuleList([first, second, third]), head)) == [first, third]


def test_blocks_that_share_a_weight_are_listed_where_that_does_not_matter() -> None:
    blocks = [Block() for _ in range(3)]
    blocks[1].parts[0][0].weight = blocks[0].parts[0][0].weight  # type: ignore[index,assignment,union-attr]
    model = Model(nn.ModuleList(blocks))
    assert find_blocks(model, sharing=True) == blocks
    assert find_blocks(model) == [blocks[2]]
