"""`deepspeed.checkpoint.utils`: copies of the tensors in a state dict."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from dsjob.deepspeed.checkpoint.utils import clone_tensors_for_torch_save


def test_every_tensor_is_a_copy_at_any_depth() -> None:
    net = nn.Linear(2, 1)
    part = torch.arange(6.0)[:2]
    state = OrderedDict(net=net.state_dict(keep_vars=True), parts=[part, (part, 3)], name="x")
    copy = clone_tensors_for_torch_save(state)
    assert type(copy) is OrderedDict
    assert copy["name"] == "x"
    assert copy["parts"][1][1] == 3
    weight = copy["net"]["weight"]
    assert torch.equal(weight, net.weight)
    assert weight.data_ptr() != net.weight.data_ptr()
    assert not weight.requires_grad
    assert copy["parts"][0].untyped_storage().nbytes() == 8
