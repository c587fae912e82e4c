"""Compares tensor parallelism to a hand-written loop over torch's `parallelize_module`, both sides in one run.

    python -m benchmarks.tensor_parallel [--sizes small medium] [--json benchmarks/results/tensor_parallel.json]

The model is transformers' Llama on two gloo ranks, which divide its layers by the same plan: DTensors by hand, plain
tensors in dsjob. The sides take turns. What counts is the CPU time of both ranks, since other work on a machine
disturbs it less. The ratio is the median over rounds of dsjob's time divided by that of the hand-written loop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dsjob
from dsjob.ranks.mesh import join_world, leave_world

RANKS, VOCABULARY = 2, 1024
SIZES = {  # width, layers, heads, length, rows
    "tiny": (32, 1, 2, 8, 2),
    "small": (128, 4, 4, 64, 4),
    "medium": (512, 4, 8, 128, 4),
}
PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def build(size: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, *_ = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_hand(size: str) -> Callable[[Tensor], Tensor]:
    model: Any = build(size)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    heads = {"lm_head": ColwiseParallel(output_layouts=Replicate()), "model.embed_tokens": RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Replicate())}  # fmt: skip
    parallelize_module(model, mesh, heads)
    parameters = list(model.parameters())
    split = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    # Operators on lists take either DTensors or plain tensors.
    optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=1e-3, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in split if p.grad is not None])
        rest = nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None])
        total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm, rest]).norm()
        nn.utils.clip_grads_with_norm_(split, 1.0, total)
        nn.utils.clip_grads_with_norm_(whole, 1.0, total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_dsjob(size: str) -> Callable[[Tensor], Tensor]:
    config = {
        "train_batch_size": SIZES[size][-1],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "tensor_parallel": {"size": RANKS},
    }
    engine = dsjob.initialize(model=build(size), config=config)[0]

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def measure(size: str, rounds: int, steps: int) -> tuple[list[tuple[float, float]], float]:
    """The CPU seconds (by hand, dsjob) of each round on this rank, and the largest difference of losses."""
    sides = {"hand": make_hand(size), "dsjob": make_dsjob(size)}
    *_, length, rows = SIZES[size]
    times, apart = [], 0.0
    generator = torch.Generator().manual_seed(1)
    for number in range(rounds + 1):
        batches = [torch.randint(VOCABULARY, (rows, length), generator=generator) for _ in range(steps)]
        spent, losses = {}, {}
        for side in ("hand", "dsjob") if number % 2 else ("dsjob", "hand"):
            dist.barrier()
            started = time.process_time()
            losses[side] = torch.stack([sides[side](batch) for batch in batches])
            spent[side] = time.process_time() - started
        apart = max(apart, float((losses["hand"] - losses["dsjob"]).abs().max()))
        times.append((spent["hand"], spent["dsjob"]))
    return times[1:], apart  # the first round sets things up


def run_rank(rank: int, folder: str, sizes: list[str], rounds: int, steps: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), DSJOB_STORE=f"{folder}/store")
    join_world(device="cpu")
    torch.set_num_threads(1)
    for size in sizes:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, measure(size, rounds, steps))
        if rank == 0:
            with open(f"{folder}/{size}.json", "w", encoding="utf-8") as file:
                json.dump(found, file)
    leave_world()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, args.sizes, args.rounds, args.steps), nprocs=RANKS)  # type: ignore[no-untyped-call]
        for size in args.sizes:
            with open(f"{folder}/{size}.json", encoding="utf-8") as file:
                ranks = json.load(file)
            # Of each round: the seconds of both ranks.
            rounds = [
                tuple(sum(side) for side in zip(*pairs, strict=True))
                for pairs in zip(*(times for times, _ in ranks), strict=True)
            ]
            ratios = [dsjob / hand for hand, dsjob in rounds]
            hand_ms, dsjob_ms = (1000 * statistics.median(side) / args.steps for side in zip(*rounds, strict=True))
            apart = max(difference for _, difference in ranks)
            ratio = statistics.median(ratios)
            spread = [min(ratios), max(ratios)]
            found = {"hand_ms": hand_ms, "dsjob_ms": dsjob_ms, "ratio": ratio, "ratio_range": spread}
            cells.append({"cell": size, **found, "losses_differ_by": apart})
            print(
                f"{size:<8} by hand {hand_ms:8.2f} ms of CPU per step   dsjob {dsjob_ms:8.2f} ms   ratio {ratio:.3f}"
                f" ({min(ratios):.3f} to {max(ratios):.3f})   losses differ by {apart:.1e}"
            )
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": args.rounds, "steps": args.steps, "cells": cells}, file, indent=2)


if __name__ == "__main__":
    main()
