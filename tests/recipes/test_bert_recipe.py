"""BERT: which bytes are hidden, what the model computes, and that the options of its layers are keys of the job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import dsjob, read_metrics
from torch.nn import functional as F

from dsjob.errors import DataError
from dsjob.recipes.bert import BYTE_VOCAB, IGNORED, MASK, Bert, MaskedText, build
from dsjob.recipes.text import ByteText

SMALL = {"context": 16, "layers": 2, "width": 32, "heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def test_items() -> None:
    data, text = MaskedText("validation", context=64, max_samples=400), ByteText("validation", context=64)
    assert len(list(data)) == 400
    items = [(data[i]["input_ids"], data[i]["labels"], text[i]["inputs"]) for i in range(400)]
    inputs, labels, original = (torch.stack(column) for column in zip(*items, strict=True))
    hidden = labels != IGNORED
    assert torch.equal(labels[hidden], original[hidden])
    assert torch.equal(inputs[~hidden], original[~hidden])
    assert hidden.any(dim=1).all()
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.02)
    masked, kept = (inputs == MASK)[hidden], (inputs == original)[hidden]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.03)
    assert inputs.max() < BYTE_VOCAB


def test_an_item_depends_on_seed_and_index_alone() -> None:
    data = MaskedText()
    first = data[7]["input_ids"]
    _ = data[3], torch.rand(3)
    assert torch.equal(data[7]["input_ids"], first)
    assert torch.equal(MaskedText(max_samples=10)[7]["input_ids"], first)
    assert not torch.equal(MaskedText(seed=1)[7]["labels"], data[7]["labels"])


@pytest.fixture
def small() -> Bert:
    torch.manual_seed(0)
    return build(**SMALL)  # type: ignore[arg-type]


def test_outputs(small: Bert) -> None:
    item = MaskedText(context=16)[0]
    ids, labels = item["input_ids"][None], item["labels"][None]
    outputs = small(ids, labels)
    assert outputs["logits"].shape == (1, 16, BYTE_VOCAB)
    kept = labels != IGNORED
    torch.testing.assert_close(outputs["loss"], F.cross_entropy(outputs["logits"][kept], labels[kept]))
    assert abs(outputs["loss"].item() - math.log(BYTE_VOCAB)) < 1.5
    assert set(small(ids)) == {"logits"}
    longer = torch.cat([ids[:, :10], torch.full((1, 6), 7)], dim=1)
    mask = torch.arange(16)[None] < 10
    torch.testing.assert_close(small(longer, None, mask.long())["logits"][:, :10], small(ids[:, :10])["logits"])
    changed = ids.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    assert (small(changed)["logits"][0, 3] != outputs["logits"][0, 3]).any()  # it looks in both directions


@pytest.mark.parametrize("pre", [False, True])
def test_learns(pre: bool) -> None:
    torch.manual_seed(0)
    model = build(**SMALL, pre_layer_norm=pre)  # type: ignore[arg-type]
    tokens = (torch.arange(16) + torch.arange(4)[:, None]) % 4  # a hidden token follows from its neighbours
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 5::4] = tokens[:, 5::4]
    inputs = tokens.where(labels == IGNORED, MASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        loss = model(inputs, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1


def test_the_options_of_layers_are_keys_of_the_job(tmp_path: Path) -> None:
    size = ["model.layers=2", "model.width=32", "model.context=32", "trainer.max_steps=20", "trainer.eval_batches=2"]
    size += ["trainer.log_every=1", "scheduler.params.warmup_num_steps=5", "trainer.micro_batch=8"]
    losses = []
    for name, options in {"plain": [], "thrifty": [f"model.{option}=true" for option in OPTIONS]}.items():
        done = dsjob("+recipe=bert_mlm", f"output.dir={name}", *size, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(list(read_metrics(tmp_path / name, "loss").values()))
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)  # the same dropout; gradients differ by rounding
    assert losses[0][-1] < losses[0][0] - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0; it must be at least 0 and below 1"),
        ({"heads": 5}, "hidden_size 128 does not divide into 5 heads"),
    ],
)
def test_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(**arguments)
    with pytest.raises(DataError, match="max_samples is 0"):
        MaskedText(max_samples=0)


def test_refuses_inputs_longer_than_the_context(small: Bert) -> None:
    with pytest.raises(ValueError, match="17 tokens long; this model has positions for 16"):
        small(torch.zeros(1, 17).long())
