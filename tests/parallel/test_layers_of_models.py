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
from dsjob.parallel.pipeline.layers import count_parameters, list_layers
from dsjob.parallel.pipeline.measure import measure_layers
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


class Counted(nn.Linear):
    """A layer that needs values to be built, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(int(torch.tensor(4)), 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_layers_that_are_looked_at_or_measured_stay_as_they_were() -> None:
    built = Counted()
    layers = list_layers([built, LayerSpec(Counted), LayerSpec(nn.Linear, 4, 4)])
    before = torch.get_rng_state()
    assert count_parameters(layers) == [20, 20, 20]
    assert len(measure_layers(layers, (torch.ones(2, 4),), torch.device("cpu"))) == 3
    assert torch.equal(torch.get_rng_state(), before)
    assert (float(built.calls), built.weight.grad) == (0, None)


def test_layers_that_change_their_input_in_place_are_measured() -> None:
    layers = list_layers([nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), LayerSpec(nn.Linear, 4, 4)])
    given = -torch.ones(2, 4)
    assert len(measure_layers(layers, (given,), torch.device("cpu"))) == 4
    assert torch.equal(given, -torch.ones(2, 4))


def test_modules_that_share_a_parameter_must_be_on_one_stage() -> None:
    def cut(bound: int) -> dict[str, tuple[int, ...]]:
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
        model[2].weight = model[0].weight
        return dict(cut_sequence(model, list_layers(model), [0, bound, 3], rank=0, ranks=2).owners)

    with pytest.raises(UsageError) as found:
        cut(2)
    assert found.value.message.startswith("layers 0 and 2 of the pipeline share a parameter (weight is weight)")
    assert 'dsjob.Layers as {"tied": 0}' in found.value.hint
    assert cut(3)["0.weight"] == (0,)


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
