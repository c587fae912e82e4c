"""Compares a pipeline of two stages to DeepSpeed's PipelineEngine, and to the ideal, on the CPU.

    python -m benchmarks.pipeline --json benchmarks/results/pipeline.json

The same GPT, as layers, is trained by the same program on both engines, with one core for each rank. The ranks of both
exist at the same time and take turns, in an order that reverses every round. A side that waits uses no CPU. A third
side trains the whole model in one process on one core. The ideal is its time divided by the stages, plus the bubble:
t / S * (M + S - 1) / M for M micro batches. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from benchmarks.engine import merge
from dsjob.programs.alias import stand_in

STAGES, HEADS, WORDS = 2, 4, 512
SHAPES = {"tiny": (32, 4, 16), "small": (128, 8, 64), "medium": (256, 8, 128)}  # width, blocks, tokens
KEY = ("size", "micro_batches", "precision")


@dataclass(frozen=True)
class Cell:
    size: str
    micro_batches: int
    precision: str

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed config."""
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "bf16": {"enabled": self.precision == "bf16"},
        }


def train(cell: Cell, stages: int, connection: Connection[Any, Any]) -> None:
    """One rank: takes as many steps as the parent asks for, and tells the seconds. Ends at 0."""
    import torch
    from torch import Tensor, nn

    torch.set_num_threads(1)
    if stages > 1:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"]) % os.cpu_count()]})  # type: ignore[operator]
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    from dsjob.recipes.gpt import Block

    # DeepSpeed would compile this for a minute. It only moves the data of collectives another way.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    width, blocks, tokens = SHAPES[cell.size]
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [
        LayerSpec(nn.Embedding, WORDS, width),
        *(LayerSpec(Block, width, HEADS, 0.0) for _ in range(blocks)),
        LayerSpec(nn.LayerNorm, width),
        LayerSpec(nn.Linear, width, WORDS),
    ]

    def find_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    model = PipelineModule(layers, num_stages=stages, loss_fn=find_loss, partition_method="type:block|linear|embedding")
    engine, *_ = deepspeed.initialize(model=model, config=cell.config)

    def read() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids = torch.randint(WORDS, (4, tokens + 1), generator=generator)
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    batches = read()
    for _ in range(2):
        engine.train_batch(batches)
    connection.send(0.0)
    while steps := connection.recv():
        started = time.perf_counter()
        for _ in range(steps):
            engine.train_batch(batches)
        connection.send((time.perf_counter() - started) / steps)


class Side:
    """The ranks of one engine in one cell."""

    def __init__(self, engine: str, cell: Cell, stages: int, folder: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        address = os.path.join(folder, f"{engine}-{stages}")
        self.rounds: list[float] = []
        self._processes = []
        with Listener(address) as listener:
            for rank in range(stages):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": stages, "MASTER_PORT": port}
                environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
                environment |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
                environment |= {"OMP_NUM_THREADS": "1"}
                if engine == "dsjob":
                    stand_in(environment)
                else:
                    environment["DS_ACCELERATOR"] = "cpu"
                given = json.dumps({"address": address, "stages": stages, "cell": asdict(cell)})
                command = [sys.executable, "-m", "benchmarks.pipeline", "--rank", given]
                self._processes.append(
                    subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
            self._ranks = [listener.accept() for _ in range(stages)]
        self._receive()

    def _receive(self) -> list[float]:
        return [rank.recv() for rank in self._ranks]

    def run(self, steps: int) -> None:
        """One round."""
        for rank in self._ranks:
            rank.send(steps)
        self.rounds.append(max(self._receive()))

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            rank.send(0)
        for process in self._processes:
            process.wait()


def measure(cell: Cell, args: Any) -> dict[str, Any]:
    """Measures all sides in one cell."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "dsjob": Side("dsjob", cell, STAGES, folder),
            "deepspeed": Side("deepspeed", cell, STAGES, folder),
            "alone": Side("dsjob", cell, 1, folder),
        }
        try:
            for number in range(args.rounds):
                for name in sides if number % 2 else reversed(sides):
                    sides[name].run(args.steps)
        finally:
            for side in sides.values():
                side.close()
    ours, theirs, alone = (sides[name].rounds for name in ("dsjob", "deepspeed", "alone"))
    count = cell.micro_batches
    ideal = [seconds / STAGES * (count + STAGES - 1) / count for seconds in alone]
    row: dict[str, Any] = {**asdict(cell), "stages": STAGES, "steps": args.steps, "rounds": args.rounds}
    for name, side in sides.items():
        row[f"{name}_ms"] = 1000 * statistics.median(side.rounds)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    row |= {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
    row["to_ideal"] = statistics.median(a / b for a, b in zip(ours, ideal, strict=True))
    row["deepspeed_to_ideal"] = statistics.median(a / b for a, b in zip(theirs, ideal, strict=True))
    return row


def describe(row: dict[str, Any]) -> str:
    """Formats a row of the table in Markdown."""
    place = f"| {row['size']} | {row['micro_batches']} | {row['precision']} "
    times = f"| {row['dsjob_ms']:.1f} | {row['deepspeed_ms']:.1f} | {row['ratio']:.2f} "
    return f"{place}{times}| {row['to_ideal']:.2f} | {row['deepspeed_to_ideal']:.2f} |"


def main() -> None:
    """Measures the cells, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["small", "medium"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a round")
    parser.add_argument("--json", metavar="FILE", help="merge the results into this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        given = json.loads(args.rank)
        with Client(given["address"]) as connection:
            train(Cell(**given["cell"]), given["stages"], connection)
        os._exit(0)
    print("| model | micro batches | precision | dsjob ms | DeepSpeed ms | ratio | to ideal | DeepSpeed to ideal |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for size in args.sizes:
        for count in args.micro_batches:
            for precision in args.precisions:
                rows.append(measure(Cell(size, count, precision), args))
                print(describe(rows[-1]), flush=True)
    if args.json:
        merge(args.json, rows, KEY)


if __name__ == "__main__":
    main()
