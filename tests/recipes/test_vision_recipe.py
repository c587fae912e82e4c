"""The digits: data, metric, and a net that learns them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader

from dsjob.errors import DataError, TargetError
from dsjob.recipes.vision import Digits, accuracy, build

pytest.importorskip("sklearn")


def test_data() -> None:
    train, validation = Digits("train"), Digits("validation")
    assert (len(train), len(validation)) == (1437, 360)
    item = train[3]
    assert item["images"].shape == (1, 8, 8)
    assert item["images"].dtype == torch.float32
    assert item["labels"].dtype == torch.int64
    assert item["labels"].shape == ()
    assert train.images.min() == 0.0
    assert train.images.max() == 1.0
    assert torch.equal(Digits("train").images, train.images)
    assert len(Digits("train", max_samples=10)) == 10
    assert set(validation.labels.tolist()) == set(range(10))


def test_outputs() -> None:
    batch = next(iter(DataLoader(Digits(), batch_size=4)))
    outputs = build(width=4)(**batch)
    assert outputs["logits"].shape == (4, 10)
    assert outputs["loss"].shape == ()
    assert set(build(width=4)(batch["images"])) == {"logits"}


def test_accuracy() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    value = accuracy({"logits": logits}, {"labels": torch.tensor([1, 0, 0, 0])})
    assert value.shape == ()
    assert value.item() == 0.75


def test_learns() -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        Digits("train"), batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(10):
        for batch in loader:  # 22 steps
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    validation = next(iter(DataLoader(Digits("validation"), batch_size=360)))
    with torch.no_grad():
        assert accuracy(model(**validation), validation) > 0.9


def test_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="width is 0"):
        build(width=0)
    with pytest.raises(DataError, match=r"unknown split 'test'\n.*train, validation"):
        Digits("test")
    with pytest.raises(DataError, match="max_samples is 0"):
        Digits(max_samples=0)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TargetError, match=r"pip install 'scikit-learn"):
        Digits()
