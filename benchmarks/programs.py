"""Compares unmodified DeepSpeed programs on dsjob's engine to the same programs on the installed DeepSpeed.

    python -m benchmarks.programs --json benchmarks/results/programs.json

There are two programs, on two ranks: transformers' Trainer with a Llama, and accelerate with a BERT classifier. The
ranks of both engines exist at the same time and take turns, in an order that reverses every round. A side that waits
uses no CPU. The ratios are dsjob's figure divided by DeepSpeed's. The CPU time of a step, summed over ranks, is the
main one, since other processes disturb it least; its ratio and that of the wall-clock time are medians over rounds.
Memory is the highest resident memory of any rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

from benchmarks.engine import merge
from benchmarks.engine_sides import use_quiet_libraries
from benchmarks.programs_sides import PROGRAMS, SHAPES, Cell, Pace, run_program
from dsjob.programs.alias import stand_in

ENGINES = ("dsjob", "deepspeed")
KEY = ("program", "size", "stage", "precision", "ranks")
KINDS = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")]
RANKS, WARM_UP = 2, 3
IMPORTED = (
    "deepspeed",
    "accelerate",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)


def start_engine(engine: str, address: str) -> subprocess.Popen[str]:
    """Starts the process that imports an engine and forks the ranks of each cell."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    if engine == "dsjob":
        stand_in(environment)
    else:
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, "-m", "benchmarks.programs", "--serve", address]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)


def serve(address: str) -> None:
    """Forks the ranks of each cell that a line of the input names, and waits for them."""
    use_quiet_libraries()
    for name in IMPORTED:
        module = import_module(name)
        # DeepSpeed would compile this for minutes. It only moves the data of collectives another way.
        compatible = getattr(getattr(module, "ops", None), "__compatible_ops__", {})
        compatible |= {"deepspeed_shm_comm": False} if compatible else {}
    for line in sys.stdin:
        task = json.loads(line)
        children = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, Cell(**task["cell"]), task["port"], address)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)


def become_rank(rank: int, cell: Cell, port: int, address: str) -> NoReturn:
    """Makes this process a rank of a cell."""
    code = 1
    try:
        gc.freeze()  # libraries often collect garbage: nothing of what was imported before
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        with Client(address) as connection:
            run_program(cell, Pace(connection, WARM_UP))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # other libraries' threads may abort an interpreter that ends


class Side:
    """The ranks of one engine in one cell."""

    def __init__(self, server: subprocess.Popen[str], listener: Listener, cell: Cell) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        assert server.stdin is not None
        server.stdin.write(json.dumps({"cell": asdict(cell), "port": port}) + "\n")
        server.stdin.flush()
        self._ranks: list[Connection[Any, Any]] = [listener.accept() for _ in range(RANKS)]
        self.rounds: list[tuple[float, float]] = []  # CPU and wall-clock seconds per step
        self.peak = max(found["peak"] for found in self._receive())

    def _receive(self) -> list[dict[str, float]]:
        return [rank.recv() for rank in self._ranks]

    def run(self, steps: int) -> None:
        for rank in self._ranks:
            rank.send(steps)
        found = self._receive()
        processor = sum(each["processor"] for each in found)
        self.rounds.append((processor / steps, max(each["wall"] for each in found) / steps))
        self.peak = max(self.peak, *(int(each["peak"]) for each in found))

    def close(self) -> None:
        for rank in self._ranks:
            rank.send(0)
            rank.close()


def measure(cell: Cell, servers: dict[str, subprocess.Popen[str]], listener: Listener, args: Any) -> dict[str, Any]:
    """Measures both engines in one cell."""
    sides = {engine: Side(server, listener, cell) for engine, server in servers.items()}
    for number in range(args.rounds):
        for engine in ENGINES if number % 2 else reversed(ENGINES):
            sides[engine].run(args.steps)
    for side in sides.values():
        side.close()
    ours, theirs = sides["dsjob"], sides["deepspeed"]
    pairs = list(zip(ours.rounds, theirs.rounds, strict=True))
    processor, wall = ([a[kind] / b[kind] for a, b in pairs] for kind in (0, 1))
    row: dict[str, Any] = {**asdict(cell), "ranks": RANKS, "steps": args.steps, "rounds": args.rounds}
    for engine, side in sides.items():
        row[f"{engine}_cpu_ms"] = 1000 * statistics.median(each[0] for each in side.rounds)
        row[f"{engine}_ms"] = 1000 * statistics.median(each[1] for each in side.rounds)
        row[f"{engine}_mib"] = side.peak / 2**20
    row |= {"cpu_ratio": statistics.median(processor), "cpu_ratio_range": [min(processor), max(processor)]}
    return row | {"ratio": statistics.median(wall), "memory_ratio": ours.peak / theirs.peak}


def describe(row: dict[str, Any]) -> str:
    """Formats a row of the table in Markdown."""
    place = f"| {row['program']} | {row['stage']} | {row['precision']} "
    times = f"| {row['dsjob_cpu_ms']:.1f} | {row['deepspeed_cpu_ms']:.1f} | {row['cpu_ratio']:.2f} "
    return f"{place}{times}| {row['ratio']:.2f} | {row['memory_ratio']:.2f} |"


HEAD = (
    "| program | ZeRO | precision | dsjob, CPU ms | DeepSpeed, CPU ms | CPU time | wall-clock time | memory |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--size", choices=list(SHAPES), default="6m")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--smoke", action="store_true", help="one tiny cell, to see whether the benchmark works")
    parser.add_argument("--json", metavar="FILE", help="merge the results into FILE")
    parser.add_argument("--show", metavar="FILE", help="only print FILE as a table")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    print(HEAD, flush=True)
    if args.show:
        with open(args.show, encoding="utf-8") as file:
            print(*map(describe, json.load(file)["cells"]), sep="\n")
        return
    if args.smoke:
        args.size, args.stages, args.programs, args.rounds, args.steps = "tiny", [3], ["accelerate"], 1, 1
    kinds = [(stage, precision) for stage, precision in KINDS if stage in args.stages]
    cells = [
        Cell(program, args.size, *kind) for program in args.programs for kind in kinds[: 1 if args.smoke else None]
    ]
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
        servers = {engine: start_engine(engine, f"{folder}/socket") for engine in ENGINES}
        try:
            for cell in cells:
                row = measure(cell, servers, listener, args)
                print(describe(row), flush=True)
                if args.json:
                    merge(args.json, [row], KEY)
        finally:
            for server in servers.values():
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
