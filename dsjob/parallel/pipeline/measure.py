"""Measures how long each layer of a sequence takes."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.data import to_device
from dsjob.parallel.pipeline.layers import Layer
from dsjob.parallel.pipeline.messages import list_tensors
from dsjob.torch_private import tree_map_only


def measure_layers(layers: Sequence[Layer], args: Sequence[Any], device: torch.device) -> list[float]:
    """The seconds of a forward and backward pass of each layer. args: what the first one is called with, several as a
    tuple.

    Only one layer at a time is on the device, besides tied ones that come again. Layers that are built already are left
    as they were.
    """
    made: dict[str, Any] = {}
    left = Counter(layer.name for layer in layers)
    seconds, value = [], to_device(args[0] if len(args) == 1 else tuple(args), device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        for layer in layers:
            if layer.name not in made:
                built = copy.deepcopy(layer.made[0]) if layer.made else layer.make()
                made[layer.name] = built.to(device) if isinstance(built, nn.Module) else built
            own = made[layer.name]
            times = []
            for _ in range(3):
                given = tree_map_only(Tensor, torch.clone, value)  # the layer may change it in place
                started = _read_clock(device)
                outputs = own(given) if layer.call is None else layer.call(own, given)
                reached = [tensor for tensor in list_tensors(outputs) if tensor.requires_grad]
                if reached:
                    torch.autograd.backward(reached, [torch.ones_like(tensor) for tensor in reached])
                times.append(_read_clock(device) - started)
            seconds.append(min(times))
            value = _detach(outputs)
            left[layer.name] -= 1
            if not left[layer.name]:
                del made[layer.name]
    return seconds


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _detach(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)
