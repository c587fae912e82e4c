"""What each option of DeepSpeedTransformerLayer saves, and what it costs, beside torch's own encoder layer.

    python -m benchmarks.transformer_layer [--rounds 3] [--json benchmarks/results/transformer_layer.json]

Memory is what autograd keeps of one layer in a stack until the backward pass, without parameters. Times are those of a
forward and a backward pass of one layer: medians over rounds in which the sides take turns, after one round to warm up.
On a CPU, they are the CPU time of one thread, so that other work on the machine matters less.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

SHAPES = ("8x128x1024x16", "2x512x1024x16")  # batch, tokens, features, heads; BERT-large has 1024 and 16
SAVINGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
DROPOUT = 0.1


def make_ours(width: int, heads: int, options: Sequence[str] = ()) -> nn.Module:
    """A layer of BERT: with LayerNorm after each part."""
    layer: nn.Module = DeepSpeedTransformerLayer(
        DeepSpeedTransformerConfig(
            hidden_size=width,
            heads=heads,
            attn_dropout_ratio=DROPOUT,
            hidden_dropout_ratio=DROPOUT,
            num_hidden_layers=24,
            initializer_range=0.02,
            pre_layer_norm=False,
            **dict.fromkeys(options, True),
        )
    )
    return layer


def make_torchs(width: int, heads: int) -> nn.Module:
    """The same layer by torch, whose feed-forward part has a third dropout."""
    gelu = partial(nn.functional.gelu, approximate="tanh")
    return nn.TransformerEncoderLayer(width, heads, 4 * width, DROPOUT, gelu, batch_first=True)


class Bert(nn.Module):
    """The same layer by transformers."""

    def __init__(self, width: int, heads: int) -> None:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        super().__init__()
        options: dict[str, Any] = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
        options |= {"hidden_act": "gelu_pytorch_tanh", "attn_implementation": "sdpa"}
        layer: Any = BertLayer  # whose constructor has no types
        self.layer = layer(BertConfig(**options))

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.layer(x)
        output: Tensor = found[0] if isinstance(found, tuple) else found  # as the version of transformers has it
        return output


SIDES: dict[str, Callable[[int, int], nn.Module]] = {
    "no option": make_ours,
    "normalize_invertible": partial(make_ours, options=SAVINGS[:1]),
    "gelu_checkpoint": partial(make_ours, options=SAVINGS[1:2]),
    "attn_dropout_checkpoint": partial(make_ours, options=SAVINGS[2:]),
    "all three": partial(make_ours, options=SAVINGS),
    "nn.TransformerEncoderLayer": make_torchs,
}


def count_saved(layers: list[nn.Module], x: Tensor) -> int:
    """The bytes that autograd keeps after a forward pass, without parameters."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # keeps it alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            x = layer(x)
        x.square()
    own = {parameter.untyped_storage().data_ptr() for layer in layers for parameter in layer.parameters()}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


def measure_time(layer: nn.Module, x: Tensor) -> float:
    """The milliseconds of a forward and a backward pass."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    if x.is_cuda:
        torch.cuda.synchronize()
    began = clock()
    torch.autograd.backward(layer(x).sum())
    if x.is_cuda:
        torch.cuda.synchronize()
    return (clock() - began) * 1e3


def compare(shape: str, dtype: str, device: str, rounds: int) -> dict[str, Any]:
    """One cell: each side's MiB and median milliseconds for a layer."""
    batch, tokens, width, heads = map(int, shape.split("x"))
    kind = {"dtype": getattr(torch, dtype), "device": device}
    torch.manual_seed(0)
    layers = {side: [make(width, heads).to(**kind) for _ in range(2)] for side, make in SIDES.items()}
    x = torch.randn(batch, tokens, width, **kind, requires_grad=True)
    # The difference leaves out what only the ends of a stack keep.
    saved = {side: count_saved(both, x) - count_saved(both[:1], x) for side, both in layers.items()}
    times = [{side: measure_time(both[0], x) for side, both in layers.items()} for _ in range(rounds + 1)][1:]
    return {
        "shape": shape,
        "dtype": dtype,
        "mib": {side: found / 2**20 for side, found in saved.items()},
        "ms": {side: statistics.median(each[side] for each in times) for side in SIDES},
    }


def compare_kernels(shape: str, device: str, clock: Callable[[Callable[[], object]], float]) -> dict[str, Any]:
    """Milliseconds of a forward and a backward pass in bf16, with and without fused kernels, and by the layers of torch
    and transformers, on a GPU also compiled. The matrix products of a pass need `flops` operations. On a CPU no side
    uses the kernels.
    """
    batch, tokens, width, heads = map(int, shape.split("x"))
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    sides = {"fused": make_ours(width, heads), "torch's operators": make_ours(width, heads)}
    sides |= {
        "fused, all three": make_ours(width, heads, SAVINGS),
        "nn.TransformerEncoderLayer": make_torchs(width, heads),
        "transformers' BertLayer": Bert(width, heads),
    }
    if device != "cpu":  # there, compiling would take longer than everything else
        others = [side for side in sides if not side.startswith("fused")]
        sides |= {f"{side}, compiled": copy.deepcopy(sides[side]) for side in others}
    x = torch.randn(batch, tokens, width, **kind, requires_grad=True)
    found = {}
    layer: Any
    for side, layer in sides.items():
        layer.to(**kind)
        if isinstance(layer, DeepSpeedTransformerLayer):
            layer.native = side.startswith("fused") and device != "cpu"
        if side.endswith("compiled"):
            layer.compile()
        found[side] = 1e3 * clock(lambda layer=layer: torch.autograd.backward(layer(x).sum()))  # type: ignore[misc]
    flops = 3 * (24.0 * batch * tokens * width**2 + 4.0 * batch * tokens**2 * width)
    return {"shape": shape, "ms": found, "flops": flops}


def show(cells: list[dict[str, Any]]) -> str:
    """The cells as a Markdown table."""
    lines = ["| batch x tokens x features x heads | dtype | side | saved, MiB | time, ms |", "|---|---|---|---|---|"]
    lines += [
        f"| {cell['shape']} | {cell['dtype']} | {side} | {cell['mib'][side]:.2f} | {cell['ms'][side]:.0f} |"
        for cell in cells
        for side in SIDES
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = [compare(shape, dtype, args.device, args.rounds) for shape in args.shapes for dtype in args.dtypes]
    print(show(cells))
    if args.json:
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        machine["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "cells": cells}, file, indent=2)


if __name__ == "__main__":
    main()
