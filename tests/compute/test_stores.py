"""How inputs wait for the backward pass, on devices that need not be there."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsjob.compute.activation.stores import Kept, Store
from dsjob.contract.spec import ActivationCheckpointing


def make_store(**keys: bool | int) -> Store:
    section = {
        "mode": "full",
        "interval": 1,
        "partition_activations": False,
        "number_checkpoints": None,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
        "cpu_checkpointing": False,
    }
    return Store(ActivationCheckpointing(**{**section, **keys}))  # type: ignore[arg-type]


@pytest.mark.parametrize("contiguous", [False, True])
def test_tensors_of_a_gpu_wait_on_the_host_and_come_back(contiguous: bool) -> None:
    """On fake tensors: a device that no machine needs to have."""
    store = make_store(cpu_checkpointing=True, contiguous_memory_optimization=contiguous, number_checkpoints=3)
    assert store.changes_anything
    with FakeTensorMode():
        tensor = torch.empty(3, 4, device="cuda", dtype=torch.bfloat16)
        kept = store.pack(tensor)
        assert isinstance(kept, Kept)
        assert (kept.part.device.type, kept.part.numel(), kept.part.dtype) == ("cpu", 12, torch.bfloat16)
        back = store.unpack(kept)
        assert (back.device.type, back.shape, back.dtype) == ("cuda", tensor.shape, torch.bfloat16)


def test_what_is_no_activation_stays_as_it_is() -> None:
    store = make_store(cpu_checkpointing=True)
    for tensor in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool), torch.empty(0)):
        assert store.pack(tensor) is tensor
        assert store.unpack(tensor) is tensor


def test_nothing_is_done_unless_asked_for() -> None:
    assert not make_store().changes_anything
    assert not make_store(partition_activations=True).changes_anything  # without other ranks that hold the same


def test_values_and_shapes_survive() -> None:
    store = make_store(contiguous_memory_optimization=True, number_checkpoints=2)
    first, second = torch.rand(2, 3).t(), torch.rand(6)
    kept = [store.pack(first), store.pack(second)]
    torch.testing.assert_close([store.unpack(item) for item in kept], [first, second], rtol=0, atol=0)
