"""Everything that needs a GPU, in one run of at most ten minutes: tests, then speed, memory and races on one device.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json            # every section
    python -m benchmarks.gpu --sections syncs races --smoke                # tiny sizes, on a CPU too

Sections run in order, each in the remaining time. A section that fails is reported, and the next one runs. The file is
written after each section. Rates are reported as shares of the ceilings measured in the same run: matrix products in
bf16, and copies within the device's memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.engine import measure
from benchmarks.engine_sides import SHAPES, Cell, Ours, synchronize, use_quiet_libraries
from benchmarks.kernels import time_kernels
from benchmarks.planned import make_on_meta, measure_offload, predict, resolve
from benchmarks.transformer_layer import compare_kernels
from dsjob.ops import fused
from dsjob.optim import build_optimizer
from dsjob.parallel import masters
from dsjob.ranks.mesh import World, join_world

Row = dict[str, Any]
OFFLOADS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "optimizer": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
    "param": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
}
# Bytes that a step of each optimizer has to move for one fp32 parameter: it, its gradient, its moments, both ways.
OPTIMIZERS = {"AdamW": 28, "Lion": 20, "Lamb": 28, "SGD": 12}


@dataclass(frozen=True)
class Bench:
    """State shared by the sections. `ceilings`: FLOP/s of matrix products, bytes/s of copies; `left`: seconds."""

    world: World
    smoke: bool
    ends: float
    ceilings: dict[str, float]

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def pick(self, full: Any, tiny: Any) -> Any:
        """The size for a real run, or for a smoke run."""
        return tiny if self.smoke else full

    def cell(self, size: str, micro_batch: int, **more: Any) -> Cell:
        """A cell with one rank in bf16."""
        return Cell(self.pick(size, "tiny"), 0, "bf16", 1, self.pick(micro_batch, 1), **more)


@contextmanager
def job_sections(sections: Mapping[str, Any]) -> Iterator[None]:
    """Adds these sections to the job of dsjob's side."""
    before, Ours.sections = Ours.sections, sections
    try:
        yield
    finally:
        Ours.sections = before


def clock(world: World, call: Callable[[], object], rounds: int = 5) -> float:
    """The median seconds of several calls, including the work on the device."""
    times = []
    for _ in range(rounds + 1):
        synchronize(world)
        started = time.perf_counter()
        call()
        synchronize(world)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def count_flops(cell: Cell, parameters: int) -> float:
    """Floating-point operations of a step: 6 a parameter and token, and 12 a layer, width and pair of tokens for
    attention (Chowdhery et al., 2022, appendix B: as if it were not causal, recomputation not counted)."""
    width, layers, _ = SHAPES[cell.size]
    tokens = cell.micro_batch * cell.accumulation * cell.tokens
    return tokens * (6.0 * parameters + 12.0 * layers * width * cell.tokens)


def peak_bytes(world: World) -> int:
    return torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0


def run_tests(bench: Bench) -> list[Row]:
    """The tests marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    if bench.smoke:
        command.append("--collect-only")
    found = subprocess.run(command, capture_output=True, text=True, timeout=max(60.0, bench.left))
    return [{"exit": found.returncode, "told": (found.stdout.strip().splitlines() or ["nothing"])[-1]}]


def train(bench: Bench) -> list[Row]:
    """Steps of a GPT with 1.2B parameters, eager and compiled, compared to a hand-written loop and DeepSpeed."""
    rows = []
    for compiled in (False, True) if not bench.smoke else (False,):
        cell = bench.cell("1b", 4, compiled=compiled)
        parameters = sum(p.numel() for p in make_on_meta(cell).parameters())
        others = ["hand"] + ["deepspeed"] * (importlib.util.find_spec("deepspeed") is not None and not compiled)
        for row in measure(cell, bench.world, others, bench.pick(5, 1)):
            rate = count_flops(cell, parameters) / bench.ceilings["flops"]
            share = {k: rate / (row[f"{k}_ms"] / 1000) for k in ("dsjob", "other") if f"{k}_ms" in row}
            rows.append({**row, "compiled": compiled, "parameters": parameters, "share_of_matmul_rate": share})
        gc.collect()
    return rows


def find_syncs(bench: Bench) -> list[Row]:
    """Checks that no step waits for the device: torch raises an error at each wait."""
    rows = []
    jobs: dict[str, Mapping[str, Any]] = {
        "fp32": {"bf16": {"enabled": False}},
        "bf16": {},
        "bf16, no clipping": {"gradient_clipping": 0},
        "bf16, recomputed": {"activation_checkpointing": {"mode": "full"}},
    }
    for name, sections in jobs.items():
        with job_sections(sections):
            side = Ours(bench.cell("10m", 1), bench.world)
            side.run(2)
            waits = ""
            if bench.world.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                side.step()
            except RuntimeError as error:
                frames = [f for f in traceback.extract_tb(error.__traceback__) if "/dsjob/" in f.filename]
                waits = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else str(error)[:200]
            finally:
                if bench.world.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            side.close()
        rows.append({"job": name, "waits_at": waits or None})
    return rows


def find_races(bench: Bench) -> list[Row]:
    """Compares weights after steps with delays on all side streams to those after undisturbed steps."""
    rows = []
    for name, sections in OFFLOADS.items():
        found = []
        for late in (False, True):
            disturbed = late and bench.world.device.type == "cuda"
            with job_sections(sections), _late_streams(disturbed), _parts_of(1 << 20):
                torch.manual_seed(0)
                side = Ours(bench.cell("10m", 2), bench.world)
                for _ in range(4):
                    side.step()
                synchronize(bench.world)
                found.append({n: v.detach().float().cpu() for n, v in side.engine.module_state_dict().items()})
                side.close()
        first, second = found
        rows.append({"offload": name, "same": all(torch.equal(value, second[n]) for n, value in first.items())})
    return rows


@contextmanager
def _late_streams(enabled: bool) -> Iterator[None]:
    """Delays each stream that is entered by some milliseconds, to expose races."""
    cuda: Any = torch.cuda
    enter = cuda.StreamContext.__enter__

    def enter_late(context: torch.cuda.StreamContext) -> None:
        enter(context)
        cuda._sleep(20_000_000)

    if enabled:
        cuda.StreamContext.__enter__ = enter_late
    try:
        yield
    finally:
        cuda.StreamContext.__enter__ = enter


@contextmanager
def _parts_of(size: int) -> Iterator[None]:
    """Sets how many bytes of masters an offloaded optimizer steps before it sends their new weights."""
    before, masters.PART = masters.PART, size
    try:
        yield
    finally:
        masters.PART = before


def offload(bench: Bench) -> list[Row]:
    """Time and peak memory of a step with offloaded masters or parameters; also without overlapping the copies."""
    rows = []
    for name, size in (*((name, masters.PART) for name in OFFLOADS), ("optimizer", sys.maxsize)):
        with job_sections(OFFLOADS[name]), _parts_of(size):
            told = {"in_parts": size < sys.maxsize} if name == "optimizer" else {}
            rows.append({"offload": name, **told, **_step(bench, bench.cell("300m", 4))})
    return rows


def recompute(bench: Bench) -> list[Row]:
    """Time and peak memory of a step with activation checkpointing."""
    rows = []
    for mode in ("none", "full", "selective"):
        with job_sections({"activation_checkpointing": {"mode": mode}}):
            rows.append({"mode": mode, **_step(bench, bench.cell("300m", 8))})
    return rows


def _step(bench: Bench, cell: Cell) -> Row:
    if bench.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    side = Ours(cell, bench.world)
    seconds = clock(bench.world, side.step, bench.pick(5, 1))
    peak = peak_bytes(bench.world)
    side.close()
    del side
    gc.collect()
    return {"ms": 1000 * seconds, "peak_bytes": peak}


def step_optimizers(bench: Bench) -> list[Row]:
    """A step of each optimizer on 200M parameters, as a share of the memory bandwidth that copies reach."""
    shape = bench.pick([(4096, 4096)] * 12, [(64, 64)] * 2)
    rows = []
    for name, moved in OPTIMIZERS.items():
        weights = [nn.Parameter(torch.randn(size, device=bench.world.device)) for size in shape]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        method = resolve(name).optimizer
        assert method is not None
        optimizer = build_optimizer(method, weights)
        seconds = clock(bench.world, optimizer.step, bench.pick(10, 1))
        elements = sum(weight.numel() for weight in weights)
        rate = moved * elements / seconds
        rows.append({"optimizer": name, "ms": 1000 * seconds, "share_of_copies": rate / bench.ceilings["bytes"]})
        del optimizer, weights
        gc.collect()
    return rows


def time_layers(bench: Bench) -> list[Row]:
    """DeepSpeedTransformerLayer with and without its fused kernels, which this builds, at the sizes of BERT-large."""
    if (device := bench.world.device.type) == "cuda" and (problem := fused.find_problem(build=True)):
        raise RuntimeError(problem)
    shapes = bench.pick(("8x128x1024x16", "64x128x1024x16", "8x512x1024x16", "64x512x1024x16"), ("2x4x8x2",))
    return [compare_kernels(shape, device, lambda call: clock(bench.world, call)) for shape in shapes]


def time_parts(bench: Bench) -> list[Row]:
    """Each kernel of that layer, as a share of the memory bandwidth that copies reach."""
    if (device := bench.world.device.type) == "cuda" and (problem := fused.find_problem(build=True)):
        raise RuntimeError(problem)
    shapes = bench.pick(("8x128x1024x16", "64x512x1024x16"), ("2x4x8x2",))
    found = [time_kernels(s, device, lambda call: clock(bench.world, call), bench.ceilings["bytes"]) for s in shapes]
    return [row for rows in found for row in rows]


def save(bench: Bench) -> list[Row]:
    """Saves a checkpoint to memory and to disk, and loads it."""
    rows = []
    side = Ours(bench.cell("300m", 1), bench.world)
    side.run(1)
    for place in ("/dev/shm", tempfile.gettempdir()):
        if not os.access(place, os.W_OK):
            continue
        with tempfile.TemporaryDirectory(dir=place) as folder:
            written = clock(bench.world, lambda to=folder: side.engine.save_checkpoint(to), 1)  # type: ignore[misc]
            size = sum(os.path.getsize(os.path.join(at, n)) for at, _, names in os.walk(folder) for n in names)
            read = clock(bench.world, lambda to=folder: side.engine.load_checkpoint(to), 1)  # type: ignore[misc]
        rows.append({"place": place, "save_s": written, "load_s": read, "bytes": size})
    side.close()
    return rows


def offload_large(bench: Bench) -> list[Row]:
    """ZeRO-Offload of a model with 6.5B parameters: tokens/s, peak memory, and the share of the time in Adam."""
    return [measure_offload(bench.cell("6.5b", 8), bench.world, bench.pick(3, 1))]


def compare_with_plan(bench: Bench) -> list[Row]:
    """Compares the peak memory that `dsjob plan` predicts for a step to the measured one."""
    rows = []
    for mode in ("none", "full"):
        cell = bench.cell("300m", 4)
        sections = {"activation_checkpointing": {"mode": mode}}
        with job_sections(sections):
            found = _step(bench, cell)
        predicted = predict(cell, bench.world, sections).peak
        rows.append({"mode": mode, "predicted_bytes": predicted, "measured_bytes": found["peak_bytes"]})
    return rows


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "train": train,
    "syncs": find_syncs,
    "races": find_races,
    "plan": compare_with_plan,
    "recompute": recompute,
    "offload": offload,
    "optimizers": step_optimizers,
    "layers": time_layers,
    "kernels": time_parts,
    "saves": save,
    "offload-large": offload_large,
    "tests": run_tests,
}


def find_ceilings(world: World, smoke: bool) -> dict[str, float]:
    """FLOP/s of matrix products of random bf16 numbers, and bytes/s (read and written) of copies within the device."""
    size = 128 if smoke else 8192
    left, right = (torch.randn(size, size, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << (20 if smoke else 31), dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    multiplied = clock(world, lambda: [left @ right for _ in range(10)]) / 10
    copied = clock(world, lambda: target.copy_(source))
    return {"flops": 2.0 * size**3 / multiplied, "bytes": 2.0 * source.nbytes / copied}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=570.0, help="start no section after this time")
    parser.add_argument("--smoke", action="store_true", help="use tiny sizes, to check only that it runs")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args()
    use_quiet_libraries()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    world = join_world(device="auto")
    world.ensure_group()
    if world.device.type != "cuda" and not args.smoke:
        parser.error("there is no CUDA device; --smoke tries the benchmark itself on the CPU")
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    bench = Bench(world, args.smoke, time.monotonic() + args.seconds, find_ceilings(world, args.smoke))
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "ceilings": bench.ceilings, "sections": {}}
    failed = []
    for section in args.sections:
        if bench.left <= 0:
            failed.append(section)
            print(f"{section}: no time is left", flush=True)
            continue
        try:
            rows = SECTIONS[section](bench)
        except Exception as error:
            traceback.print_exc()
            rows = [{"failed": f"{type(error).__name__}: {str(error)[:300]}"}]
            failed.append(section)
        found["sections"][section] = rows
        for row in rows:
            print(f"{section}: {json.dumps(row)}", flush=True)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=2)
                file.write("\n")
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # other libraries' threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
