"""Compares dsjob's loop to a hand-written one, with the same model, data and optimizer, both sides in one run.

    python -m benchmarks.loop [--rounds 7] [--steps 40] [--json benchmarks/results/loop.json]

There are two cells: one process, and FSDP2 (ZeRO-3) on two ranks. The sides take turns. Each round measures the time of
its steps, including logs. The ratio is the median over rounds of dsjob's time divided by the hand-written loop's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from dsjob.callbacks.callback import Callback
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.contract.models import SOLE
from dsjob.contract.spec import JobSpec, view
from dsjob.data import load_training
from dsjob.document import compose
from dsjob.document.resolve import resolve_job
from dsjob.engine.build import build_engine
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.ranks.mesh import World, join_world, leave_world
from dsjob.training import loop
from dsjob.training.objective import Objective
from dsjob.training.passed import Passed
from dsjob.training.run import Run
from dsjob.training.steps import make_micro_step
from dsjob.training.trainer import Parts, Trainer
from dsjob.trust.grant import Trust
from dsjob.trust.targets import call_target


def make_spec(world_size: int, warm_up: int, steps: int) -> JobSpec:
    """The quickstart recipe, shortened to the steps of one round."""
    overrides = [
        "+recipe=quickstart",
        f"trainer.max_steps={warm_up + steps}",
        f"trainer.log_every={warm_up}",
        "~data.eval",
        *(f"~trainer.{key}" for key in ("eval_at_start", "eval_batches", "eval_every")),
        "trainer.train_batch=16",
        f"trainer.micro_batch={16 // world_size}",
        f"zero_optimization.stage={3 if world_size > 1 else 0}",
        "checkpoint.at_end=false",
        "~scheduler",
        "~callbacks.sample",
    ]
    composed = compose.compose(overrides)
    return view(JobSpec, resolve_job(composed.document, world_size=world_size, locate=composed.locate).document)


class Clock(Callback):
    """The times of the first and the last log record."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_log(self, run: Any, record: Mapping[str, float]) -> None:
        self.times.append(time.perf_counter())


def run_dsjob(spec: JobSpec, world: World, dataset: Any, folder: str) -> float:
    """The seconds of dsjob's steps after the warm-up."""
    torch.manual_seed(0)
    assert spec.model is not None
    engine = build_engine(call_target(spec.model), spec, world, kind=Engine)
    clock = Clock()
    run = Run(
        spec=spec,
        engines=Engines({SOLE: engine}),
        micro_step=make_micro_step(None, Objective()),
        loader=load_training(dataset, micro_batch=spec.trainer.micro_batch, world=world, seed=0),
        max_steps=spec.trainer.max_steps or 0,
        passed=Passed(spec),
        parts=Parts(Trainer(), spec, Trust()),
        checkpointer=Checkpointer(folder, world=world),
        callbacks=[clock],
        say=lambda title, text: None,
    )
    loop.train(run)
    return clock.times[-1] - clock.times[0]


def run_by_hand(spec: JobSpec, world: World, dataset: Any, warm_up: int) -> float:
    """The seconds of the same steps in plain PyTorch, which prints as often as dsjob logs."""
    torch.manual_seed(0)
    assert spec.model is not None
    model: nn.Module = call_target(spec.model)
    if world.data_size > 1:
        mesh = world.data_mesh
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=spec.optimizer.params["lr"], fused=True)  # type: ignore[union-attr]
    batches = iterate(dataset, spec.trainer.micro_batch)
    started = total = 0.0
    for step in range(spec.trainer.max_steps or 0):
        if step == warm_up:
            started = time.perf_counter()
        loss = model(**next(batches))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, spec.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % spec.trainer.log_every.amount == 0:
            total += loss.item()
    return time.perf_counter() - started


def iterate(dataset: Any, batch_size: int) -> Iterator[Any]:
    while True:
        yield from DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def measure(rounds: int, warm_up: int, steps: int) -> list[tuple[float, float]]:
    """The seconds (by hand, dsjob) of each round, as measured on this rank."""
    world = join_world(device="auto")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.data_size))
    spec = make_spec(world.data_size, warm_up, steps)
    assert spec.data.train is not None
    dataset = call_target(spec.data.train)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            sides = {}
            for side in ("hand", "dsjob") if number % 2 else ("dsjob", "hand"):
                by_hand = side == "hand"
                sides[side] = (
                    run_by_hand(spec, world, dataset, warm_up) if by_hand else run_dsjob(spec, world, dataset, folder)
                )
            found.append((sides["hand"], sides["dsjob"]))
    leave_world()
    return found[1:]  # the first round pays for caches


def run_rank(rank: int, world_size: int, folder: str, rounds: int, warm_up: int, steps: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DSJOB_STORE=f"{folder}/store")
    found = measure(rounds, warm_up, steps)
    if rank == 0:
        with open(f"{folder}/times.json", "w", encoding="utf-8") as file:
            json.dump(found, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="a multiple of --warm-up")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the clock starts, and between logs")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure; 1 runs without FSDP2"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    cells = []
    for world_size in args.ranks:
        name = "one process" if world_size == 1 else f"FSDP2, {world_size} ranks"
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, folder, args.rounds, args.warm_up, args.steps)
            torch.multiprocessing.spawn(run_rank, arguments, nprocs=world_size)  # type: ignore[no-untyped-call]
            with open(f"{folder}/times.json", encoding="utf-8") as file:
                times = json.load(file)
        ratios = [dsjob / hand for hand, dsjob in times]
        cells.append(
            {
                "cell": name,
                "hand_ms": 1000 * statistics.median(hand for hand, _ in times) / args.steps,
                "dsjob_ms": 1000 * statistics.median(dsjob for _, dsjob in times) / args.steps,
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
        )
        cell = cells[-1]
        print(
            f"{name:<18} by hand {cell['hand_ms']:7.2f} ms/step   dsjob {cell['dsjob_ms']:7.2f} ms/step   "
            f"ratio {cell['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
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
