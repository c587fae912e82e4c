"""Targets that are counted on a device: the numbers of those counted on the host, and nothing to wait for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsjob.compute.calls import Loss
from dsjob.data.batches import count_targets
from dsjob.training.averaging import Part, Step


def test_labels_on_a_device_are_counted_there() -> None:
    count = count_targets({"labels": torch.zeros(2, 3, dtype=torch.int64, device="meta")})
    assert isinstance(count, Tensor)  # of no value, which `int` would have asked for
    assert count.shape == ()
    assert count_targets({"labels": torch.tensor([[1, -100, 2]])}, shifted=True) == 1


@pytest.mark.parametrize("targets", [(3, 5), (0, 7)])
def test_counts_of_a_device_weigh_as_numbers_do(targets: tuple[int, int]) -> None:
    losses = [torch.tensor(value if count else torch.nan) for value, count in zip((1.5, 2.25), targets, strict=True)]
    found = []
    for counts in (targets, tuple(map(torch.tensor, targets))):
        step = Step(None, 2, targets=[sum(counts)])
        parts = [Part(step, [count]) for count in counts]
        found.append([part.weigh([Loss(loss)])[0] for part, loss in zip(parts, losses, strict=True)])
    torch.testing.assert_close(found[1], found[0])
    assert sum(found[1]).item() / 2 == pytest.approx((targets[0] * 1.5 + targets[1] * 2.25) / sum(targets))
