"""The sides of benchmarks/checkpoint.py: the same state, saved and loaded by dsjob, torch's DCP and DeepSpeed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import dsjob
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.engine.driven import _import_deepspeed
from dsjob.ranks.mesh import World, join_world, leave_world
from dsjob.recipes.gpt import GPT

STATE = 12  # bytes a parameter: fp32 weights and AdamW's two moments
VOCAB, TOKENS = 32768, 8
Row = dict[str, Any]


def make_model(parameters: float) -> GPT:
    """A transformer with about this many parameters."""
    width = 1024 if parameters > 2e8 else 768 if parameters > 6e7 else 256
    layers = max(1, round((parameters - VOCAB * width) / (12 * width**2)))
    torch.manual_seed(0)
    return GPT(VOCAB, TOKENS, layers, width, width // 64, 0.0)


def make_config(stage: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**6,
    }


def take_step(engine: Any) -> None:
    """Takes one step, so that the optimizer has state."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    engine.backward(engine(inputs=tokens, targets=tokens)["loss"])
    engine.step()


def make_ours(model: nn.Module, stage: int, bf16: bool = False) -> Any:
    engine = dsjob.initialize(model=model, config=make_config(stage, bf16))[0]
    take_step(engine)
    engine.zero_grad()
    return engine


def make_theirs(model: nn.Module, stage: int, world: World, bf16: bool = False) -> Any:
    """DeepSpeed's own engine."""
    world.ensure_group()
    deepspeed = _import_deepspeed(world)
    config = make_config(stage, bf16)
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    take_step(engine)
    return engine


class Clock:
    """Measures seconds, from a barrier to a barrier, and this rank's peak memory minus its memory before."""

    def __init__(self, world: World) -> None:
        self.world = world

    def measure(self, action: Callable[[], object]) -> Row:
        """`own`: measure the seconds of this rank only. Earlier writes are already synced by their writers."""
        self.meet()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, started = read_memory("VmRSS"), time.monotonic()
        action()
        own = time.monotonic() - started
        self.meet()
        return {"s": time.monotonic() - started, "own_s": own, "mb": (read_memory("VmHWM") - before) / 1e6}

    def meet(self) -> None:
        """Waits for all ranks."""
        if self.world.data_size > 1:
            dist.barrier()


def read_memory(key: str) -> int:
    """A memory figure of this process, as the kernel reports it, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def warm(folder: Path) -> None:
    """Reads every file once, so that later reads come from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass


def list_tensors(engine: Any) -> dict[str, Tensor]:
    """The tensors that dsjob saves of an engine, for DCP to save the same."""
    state = engine.state()
    return {**state.model_tensors(), **state.optimizer_tensors()}


class Ours:
    """dsjob and DCP, which save and load the state of one engine."""

    def __init__(self, world: World, folder: Path, parameters: float) -> None:
        self.world, self.clock, self.folder = world, Clock(world), folder
        self.engine = make_ours(make_model(parameters), stage=3 if world.data_size > 1 else 0)
        self.checkpointers = {side: Checkpointer(str(folder / side), world=world) for side in ("dsjob", "async")}
        self.number = 0

    def save(self, side: str) -> Row:
        """Saves with one side, and deletes its previous save."""
        self.number += 1
        tag = f"save{self.number}"
        if self.world.data_rank == 0:
            self.clear(self.folder / side)
        if side == "dcp":
            writer = dcp.FileSystemWriter(self.folder / side / tag)  # one thread, synced: its defaults
            return self.clock.measure(lambda: dcp.save(list_tensors(self.engine), storage_writer=writer))
        checkpointer = self.checkpointers[side]
        if side == "dsjob":
            return self.clock.measure(lambda: checkpointer.save(self.engine, tag=tag))
        started = time.monotonic()
        stall = self.clock.measure(lambda: checkpointer.save_behind(self.engine, tag=tag))
        checkpointer.settle()
        return {**stall, "s": stall["own_s"], "total_s": time.monotonic() - started}

    def clear(self, folder: Path) -> None:
        for path in [*folder.glob("save*"), *folder.glob("commits/*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def load(self, side: str) -> Row:
        """Loads the last save of a side from the page cache."""
        if self.world.data_rank == 0:
            warm(self.folder / side)
        if side == "dsjob":
            return self.clock.measure(lambda: self.checkpointers[side].load(self.engine))
        reader = dcp.FileSystemReader(next((self.folder / side).glob("save*")))
        tensors = list_tensors(self.engine)
        return self.clock.measure(lambda: dcp.load(tensors, storage_reader=reader))

    def run(self, rounds: int) -> dict[str, list[Row]]:
        """The measurements of each side by round. The sides take turns; the first round is a warm-up."""
        found: dict[str, list[Row]] = {}
        for part, sides in (("save", ("dsjob", "dcp", "async")), ("load", ("dsjob", "dcp"))):
            for number in range(rounds + 1):
                for side in sides if number % 2 else reversed(sides):
                    found.setdefault(f"{part} {side}", []).append(getattr(self, part)(side))
        return found


class Theirs:
    """DeepSpeed's save_checkpoint of the same model and optimizer."""

    def __init__(self, world: World, folder: Path, parameters: float) -> None:
        self.world, self.clock, self.folder = world, Clock(world), folder
        self.engine = make_theirs(make_model(parameters), 3 if world.data_size > 1 else 0, world)

    def run(self, rounds: int) -> dict[str, list[Row]]:
        """Measures DeepSpeed's save unchanged. `synced_s` adds an fsync of each file, which DeepSpeed omits."""
        rows = []
        for number in range(rounds + 1):
            folder = self.folder / "deepspeed" / str(number)
            row = self.clock.measure(lambda: self.engine.save_checkpoint(str(folder), tag="t"))  # noqa: B023
            started = time.monotonic()
            if self.world.data_rank == 0:
                for path in folder.rglob("*"):
                    sync(path)
            rows.append({**row, "synced_s": row["s"] + time.monotonic() - started})
            self.clock.meet()
            if self.world.data_rank == 0:
                shutil.rmtree(folder)
        return {"save deepspeed": rows}


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def enter(rank: int, world_size: int, folder: str) -> World:
    """Makes this process a rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DSJOB_STORE=f"{folder}/store")
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    return join_world(device="cpu")


def run_sides(rank: int, world_size: int, folder: str, kind: type[Ours] | type[Theirs], *arguments: Any) -> None:
    """Runs one measuring rank. Rank 0 writes the slowest time and the largest memory of all ranks to `rows`."""
    world = enter(rank, world_size, folder)
    parameters, rounds = arguments
    found = kind(world, Path(folder), parameters).run(rounds)
    ranks: list[Any] = [found]
    if world_size > 1:
        ranks = [None] * world_size
        dist.all_gather_object(ranks, found)
    worst: dict[str, list[Row]] = {}
    for side in found:
        same = zip(*(one[side] for one in ranks), strict=True)
        worst[side] = [{key: max(row[key] for row in rows) for key in rows[0]} for rows in same]
    if rank == 0:
        torch.save(worst, f"{folder}/rows")
    leave_world()
    os._exit(0)  # other libraries' threads may abort an interpreter that ends


def run_maker(rank: int, world_size: int, folder: str, program: str, parameters: float) -> None:
    """Runs one rank that saves the checkpoint to convert: bf16 at stage 2, after one step."""
    world = enter(rank, world_size, folder)
    model = make_model(parameters)
    engine = make_ours(model, 2, bf16=True) if program == "dsjob" else make_theirs(model, 2, world, bf16=True)
    engine.save_checkpoint(f"{folder}/{program}", tag="t")
    leave_world()
    os._exit(0)
