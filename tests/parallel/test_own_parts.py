"""Models of which a rank keeps some parameters: the same values, from the same draws, as in the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipelined_models
import pytest
import torch
from torch import Tensor, nn

from dsjob.parallel.own_parts import NotInPartsError, Sketch, list_without_values
from dsjob.parallel.pipeline.calls import guess_owned


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))


class Net(nn.Module):
    """change: is called with the blocks when all are built."""

    def __init__(self, change: Callable[[nn.ModuleList], Any] = len) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("table", torch.rand(3))
        self.head = nn.Linear(8, 8)
        change(self.blocks)


def draw_in_many_ways(blocks: nn.ModuleList) -> None:
    for block in blocks:
        nn.init.orthogonal_(block.a.weight)
        nn.init.trunc_normal_(block.b.weight, a=-0.5, b=0.5)  # draws until it has values within the bounds
        nn.init.sparse_(block.b.weight, 0.5)
        block.b.bias.data[0].zero_()
        block.scale.data.mul_(2)
        nn.utils.parametrizations.weight_norm(block.a)


class Encoder(nn.Module):
    """Its blocks are copies of one that is not part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 4)
        self.head = nn.Linear(8, 8)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def compare(make: Callable[[], nn.Module], like: Callable[[], nn.Module] | None = None) -> int:
    """Builds the second of two parts. Returns how many parameters it has no values for."""
    sketch = Sketch(lambda: on_meta(like or make))
    kept = guess_owned(sketch.model, 2, "parameters", [1])
    torch.manual_seed(3)
    whole = make()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    part = sketch.build(make, kept)
    assert torch.equal(torch.get_rng_state(), after)
    without = list_without_values(part)
    assert not without & kept
    want: dict[str, Tensor] = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    found: dict[str, Tensor] = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        if name in without:
            assert tensor.shape == want[name].shape
            assert tensor.untyped_storage().nbytes() == tensor.itemsize
        else:
            assert torch.equal(tensor, want[name]), name
    return len(without)


@pytest.mark.parametrize(
    ("make", "without"),
    [
        (pipelined_models.build_gpt2, 25),
        (pipelined_models.build_llama, 19),
        (pipelined_models.build_t5, 18),
        (lambda: Net(draw_in_many_ways), 12),
        (Encoder, 0),
    ],
    ids=["gpt2", "llama", "t5", "draws", "copies"],
)
def test_what_is_kept_has_the_values_of_the_whole_model(make: Callable[[], nn.Module], without: int) -> None:
    assert compare(make) == without


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_own_part_of_a_pretrained_model_is_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = pipelined_models.build_llama()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    config: Any = model.config

    def load() -> nn.Module:
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        return loaded

    assert compare(load, lambda: LlamaForCausalLM._from_config(config, dtype=dtype)) == 19


def copy_first(blocks: nn.ModuleList) -> None:
    blocks[-1].a.weight.data.copy_(blocks[0].a.weight)


def read_first(blocks: nn.ModuleList) -> None:
    blocks[0].a.weight.sum().item()


def read_as_numbers(blocks: nn.ModuleList) -> None:
    blocks[0].a.weight.tolist()


def convert(blocks: nn.ModuleList) -> None:
    blocks.to(torch.bfloat16)


def share_memory(blocks: nn.ModuleList) -> None:
    blocks[-1].a.weight = nn.Parameter(blocks[0].a.weight.data)


def show_in_a_buffer(blocks: nn.ModuleList) -> None:
    blocks[-1].register_buffer("shown", blocks[0].a.weight.data)


def differ(blocks: nn.ModuleList) -> None:
    if not blocks[0].a.weight.is_meta:
        blocks[0].more = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (copy_first, "aten.copy_ reads parameters of other ranks"),
        (read_first, "aten.sum reads parameters of other ranks"),
        (read_as_numbers, "tolist reads parameters of other ranks"),
        (convert, "aten._to_copy reads parameters of other ranks"),
        (share_memory, "blocks.3.a.weight has the memory of a parameter of another rank"),
        (show_in_a_buffer, "blocks.3.shown has the memory of a parameter of another rank"),
        (differ, "builds something else on the meta device"),
    ],
)
def test_a_model_whose_parts_need_each_other_is_not_built_in_parts(
    change: Callable[[nn.ModuleList], None], reason: str
) -> None:
    sketch = Sketch(lambda: on_meta(lambda: Net(change if change is differ else len)))
    with pytest.raises(NotInPartsError, match=reason):
        sketch.build(lambda: Net(change), guess_owned(sketch.model, 2, "parameters", [1]))
