"""The GPT: what it computes, how it begins, that it learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dsjob.recipes.gpt import GPT, Block, build


@pytest.fixture
def small() -> GPT:
    torch.manual_seed(0)
    return build(vocab_size=32, context=16, layers=2, width=32, heads=4)


def draw_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(1))


def test_outputs(small: GPT) -> None:
    tokens = draw_tokens(3, 11)
    outputs = small(inputs=tokens[:, :-1], targets=tokens[:, 1:])
    assert outputs["logits"].shape == (3, 10, 32)
    expected = F.cross_entropy(outputs["logits"].reshape(30, 32), tokens[:, 1:].reshape(30))
    torch.testing.assert_close(outputs["loss"], expected)
    assert set(small(tokens)) == {"logits"}


def test_loss_is_fp32_when_the_model_is_not(small: GPT) -> None:
    outputs = small.bfloat16()(draw_tokens(2, 8), draw_tokens(2, 8))
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["loss"].dtype == torch.float32


def test_later_tokens_do_not_change_earlier_logits(small: GPT) -> None:
    tokens = draw_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 32
    before, after = small(tokens)["logits"], small(changed)["logits"]
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_order_matters(small: GPT) -> None:
    tokens = draw_tokens(1, 16)
    swapped = tokens.clone()
    swapped[0, [2, 5]] = tokens[0, [5, 2]]
    assert not torch.allclose(small(tokens)["logits"][:, -1], small(swapped)["logits"][:, -1])


def test_head_is_tied_to_the_token_embedding(small: GPT) -> None:
    vocabulary_sized = [name for name, p in small.named_parameters() if 32 in p.shape and p.numel() == 32 * 32]
    assert "tokens.weight" in vocabulary_sized
    assert not any("head" in name for name in small.state_dict())
    unused = torch.tensor([[1, 2, 3]])
    small(unused)["logits"].sum().backward()
    assert small.tokens.weight.grad is not None
    assert small.tokens.weight.grad[20].abs().sum() > 0  # token 20 is no input: its gradient comes through the head


def test_begins_near_the_uniform_guess() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 129))
    loss = build()(tokens[:, :-1], tokens[:, 1:])["loss"].item()
    assert abs(loss - math.log(256)) < 0.3


def test_first_values() -> None:
    torch.manual_seed(0)
    model = build(width=128, layers=4)
    std = 0.02 * math.sqrt(768 / 128)
    assert model.tokens.weight.std().item() == pytest.approx(std, rel=0.03)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.qkv.weight.std().item() == pytest.approx(std, rel=0.03)
    for out in (block.attention_out, block.mlp_out):
        assert out.weight.std().item() == pytest.approx(std / math.sqrt(8), rel=0.03)
        assert not out.bias.any()


def test_weights_can_be_given_after_the_meta_device() -> None:
    with torch.device("meta"):
        model = build(vocab_size=32, context=16, layers=2, width=32, heads=4)
    model.to_empty(device="cpu")
    fresh = build(vocab_size=32, context=16, layers=2, width=32, heads=4)
    for made in (model, fresh):
        torch.manual_seed(0)
        made.init_weights()
    for (name, parameter), expected in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_learns(small: GPT) -> None:
    tokens = draw_tokens(1, 4).repeat(4, 5)  # a cycle of four tokens: predictable once attention works
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = small(tokens[:, :16], tokens[:, 1:17])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 2.5
    assert losses[-1] < 0.1


def test_dropout_is_for_training_alone() -> None:
    model = build(vocab_size=32, context=16, layers=1, width=32, heads=4, dropout=0.5)
    tokens = draw_tokens(1, 16)
    assert not torch.equal(model(tokens)["logits"], model(tokens)["logits"])
    model.eval()
    torch.testing.assert_close(model(tokens)["logits"], model(tokens)["logits"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"width": 130}, "multiple of heads"),
        ({"layers": 0}, "layers is 0"),
        ({"heads": -1}, "heads is -1"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_refuses(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(**arguments)


def test_refuses_inputs_longer_than_the_context(small: GPT) -> None:
    with pytest.raises(ValueError, match="17 tokens long; this model has positions for 16"):
        small(draw_tokens(1, 17))
