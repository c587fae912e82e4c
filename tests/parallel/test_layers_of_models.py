"""dsjob.Layers: a model of layers, some of them used several times."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsjob import Layers
from dsjob.deepspeed.pipe import LayerSpec, TiedLayerSpec
from dsjob.errors import UsageError
from dsjob.parallel.pipeline.layers import list_layers
from dsjob.parallel.pipeline.stage import cut_sequence


def go_back(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight


def build() -> Layers:
    again = partial(TiedLayerSpec, "square", nn.Linear, 4, 4)
    own = nn.Linear(4, 4)
    functions = [nn.Embedding(7, 4), torch.tanh, own, torch.relu, own]
    tied = [{"tied": 2}, again(), again(forward_fn=go_back), {"tied": 4, "forward": go_back}]
    return Layers([*functions, *tied, own, {"tied": 0}])


def test_layers_are_called_one_after_another() -> None:
    torch.manual_seed(0)
    model = build()
    embedding, own, square = (model.get_submodule(name) for name in ("0", "2", "6"))
    assert list(dict(model.named_parameters())) == ["0.weight", "2.weight", "2.bias", "6.weight", "6.bias"]
    ids = torch.arange(5)
    x = torch.tanh(embedding(ids))
    x = own(own(torch.relu(own(x))))
    x = go_back(own, go_back(square, square(x)))  # type: ignore[arg-type]
    expected = own(x) @ embedding.weight.T  # type: ignore[operator]
    assert torch.equal(model(ids), expected)
    # Divided on two ranks, each with what it needs.
    parts = []
    for rank in range(2):
        torch.manual_seed(0)
        part = build()
        stage = cut_sequence(part, list_layers(part), [0, 6, 11], rank=rank, ranks=2)
        parts.append(part)
        assert set(dict(stage.owners)) == set(dict(model.named_parameters()))
    between = parts[0](ids, pipe_chunk=0)
    assert torch.equal(parts[1](between, pipe_chunk=0), expected)
    assert [sorted(dict(part.named_children())) for part in parts] == [["0", "2"], ["0", "2", "6"]]


def test_several_inputs_are_a_tuple() -> None:
    assert Layers([sum])(torch.ones(1), torch.ones(1)).item() == 2
    assert Layers([LayerSpec(nn.Linear, 2, 2), nn.Flatten()])(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"tied": 0}], "layer 0 is {'tied': 0}"),
        ([nn.ReLU(), {"tied": 1}], "layer 1 is {'tied': 1}"),
        ([nn.ReLU(), {"tied": 0, "call": abs}], "layer 1 is {'tied': 0, 'call'"),
        ([nn.ReLU(), 3], "layer 1 of the pipeline is int, which cannot be called"),
    ],
)
def test_mistakes(layers: list[Any], message: str) -> None:
    with pytest.raises(UsageError) as found:
        Layers(layers)
    assert found.value.message.startswith(message)
