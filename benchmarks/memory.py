"""Bytes of model states per rank, by ZeRO stage, number of ranks and offloading, measured on tensors of real runs.

    python -m benchmarks.memory [--ranks 1 2 4] [--json benchmarks/results/memory.json]

The model is a transformer with 10 million parameters in bf16, with AdamW and two micro batches per step, on gloo.
`parameters`: tensors that the model computes with, except masters, between two micro batches. `gradients`: the larger
of the gradients between micro batches and during the optimizer step, without DDP's buckets (2 bytes per parameter at
stage 0), which cannot be observed. `optimizer`: fp32 masters and Adam's moments. `host`: the part of all three that is
offloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dsjob
from dsjob.engine.engine import Engine
from dsjob.optim.shards import local
from dsjob.ranks.mesh import join_world, leave_world

VOCAB, WIDTH, LAYERS = 8192, 256, 8
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "param": {"offload_param": {"device": "cpu"}},
}
KINDS = ("parameters", "gradients", "optimizer")


class Transformer(nn.Module):
    """Maps tokens to a loss."""

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def is_meaningful(stage: int, offload: str) -> bool:
    """Whether a stage supports this kind of offloading."""
    return {"none": True, "optimizer": stage > 0, "param": stage == 3}[offload]


def measure(stage: int, offload: str, model: nn.Module) -> dict[str, dict[str, int]]:
    """Bytes on this rank in its second step, by kind, on `device` and `host`."""
    engine, optimizer, _, _ = dsjob.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage, **WAYS[offload]},
        },
    )
    assert optimizer is not None
    shards = list(engine.module.parameters())  # in a pass the model shows gathered ones in their place
    seen: list[dict[str, dict[str, int]]] = []
    step = optimizer.step

    def watched(*args: Any) -> Any:
        seen.append(count(engine, shards, offload))
        return step(*args)

    optimizer.step = watched  # type: ignore[method-assign, assignment]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for number in range(4):
        engine.backward(engine(tokens))
        engine.step()
        if number == 2:
            seen.append(count(engine, shards, offload))
    between, stepping = seen[1:]
    most = {place: max((found[place]["gradients"] for found in (between, stepping)), default=0) for place in between}
    return {place: {**between[place], "gradients": most[place]} for place in between}


def count(engine: Engine, shards: list[nn.Parameter], offload: str) -> dict[str, dict[str, int]]:
    """Bytes of all current model states. Without a GPU, what counts as `host` follows from the owner of a tensor."""
    masters = list(engine.strategy.masters.values())
    known = {id(master) for master in masters}
    held = [p for p in [*shards, *engine.module.parameters()] if id(p) not in known]
    moments = [value for state in engine.optimizer.state.values() for value in state.values()]  # type: ignore[union-attr]
    kinds: dict[str, tuple[Sequence[Tensor], str]] = {
        "parameters": (held, "device"),
        "gradients of the model": ([p.grad for p in held if p.grad is not None], "device"),
        "gradients": ([p.grad for p in masters if p.grad is not None], "device" if offload == "none" else "host"),
        "optimizer": ([*masters, *moments], "device" if offload == "none" else "host"),
    }
    found = {place: dict.fromkeys(KINDS, 0) for place in ("device", "host")}
    for kind, (tensors, place) in kinds.items():
        found[place][kind.split()[0]] += count_bytes(tensors)
    return found


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors; each storage counts once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run_rank(rank: int, world_size: int, folder: str, shape: tuple[int, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DSJOB_STORE=f"{folder}/store")
    torch.set_num_threads(1)
    join_world(device="cpu")
    found = measure_all(shape)
    if rank == 0:
        with open(f"{folder}/bytes.json", "w", encoding="utf-8") as file:
            json.dump(found, file)
    leave_world()


def measure_all(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row for each stage and kind of offloading, for a transformer of this shape."""
    return [
        {"stage": stage, "offload": offload, **measure(stage, offload, Transformer(*shape))}
        for stage, offload in itertools.product(range(4), WAYS)
        if is_meaningful(stage, offload)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--smoke", action="store_true", help="use a tiny model, to check only that it runs")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    shape = (VOCAB, 64, 2) if args.smoke else (VOCAB, WIDTH, LAYERS)
    parameters = sum(p.numel() for p in Transformer(*shape).parameters())
    print(f"{parameters:,} parameters; bytes per parameter on rank 0")
    print(
        f"{'ranks':>5} {'stage':>5} {'offload':<9} {'parameters':>10} {'gradients':>10} {'optimizer':>10} "
        f"{'device':>7} {'host':>7}"
    )
    rows = []
    for world_size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (world_size, folder, shape), nprocs=world_size)  # type: ignore[no-untyped-call]
            with open(f"{folder}/bytes.json", encoding="utf-8") as file:
                found = json.load(file)
        for row in found:
            rows.append({"ranks": world_size, **row})
            device, host = row["device"], row["host"]
            cells = [device[kind] / parameters for kind in KINDS]
            print(
                f"{world_size:>5} {row['stage']:>5} {row['offload']:<9} {cells[0]:>10.2f} {cells[1]:>10.2f} "
                f"{cells[2]:>10.2f} {sum(cells):>7.2f} {sum(host.values()) / parameters:>7.2f}"
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "parameters": parameters, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
