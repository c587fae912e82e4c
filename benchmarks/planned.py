"""What dsjob predicts for a cell of benchmarks/gpu.py, and its largest cell: ZeRO-Offload of 6.5 billion parameters.

The plan for it: 18.5 GiB on the GPU, and 109 GiB on the host, where masters, their gradients and the state of AdamW
take 16 bytes a parameter, and gradients on their way 2.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.engine_sides import Cell, Ours, make_batches, make_model
from dsjob.contract.spec import JobSpec, view
from dsjob.document.resolve import resolve_job
from dsjob.optim.host import take_step
from dsjob.parallel import masters
from dsjob.planning.memory import Memory, predict_memory
from dsjob.planning.model import Layout, Offload
from dsjob.ranks.mesh import World
from dsjob.recipes.gpt import GPT
from dsjob.training.activations import measure_activations
from dsjob.training.probe import probe_optimizer, size_model

ZERO_OFFLOAD: Mapping[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "activation_checkpointing": {"mode": "full"},
}


def resolve(optimizer: str, **sections: Any) -> JobSpec:
    """A job with this type of optimizer."""
    job = {
        "model": {"_target_": "dsjob.recipes.gpt.build"},
        "data": {"train": {"_target_": "dsjob.recipes.text.ByteText"}},
        "trainer": {"micro_batch": 1, "grad_accum": 1, "max_steps": 1},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4}},
        **sections,
    }
    return view(JobSpec, resolve_job(job, world_size=1, locate=lambda path: ("benchmark", 0, 0)).document)


def make_on_meta(cell: Cell) -> nn.Module:
    """The cell's model without memory."""
    with torch.device("meta"):
        model: nn.Module = make_model(cell)
    return model


def predict(cell: Cell, world: World, sections: Mapping[str, Any], offload: Offload = "none", stage: int = 0) -> Memory:
    """The memory that `dsjob plan` predicts for a step of AdamW in bf16 on one rank."""
    spec = resolve("AdamW", bf16={"enabled": True}, **sections)
    assert spec.optimizer is not None
    batch = make_batches(cell, replace(world, device=torch.device("cpu")))[0]
    kept = measure_activations(make_on_meta(cell), batch, spec)
    layout = Layout(stage, 1, compute=2, reduce=2, micro_batch=cell.micro_batch, offload=offload)
    state = probe_optimizer(spec.optimizer)
    model = size_model(make_on_meta(cell))
    return predict_memory(model, layout, state, activations=kept.asked, largest_activation=kept.largest)


class _OnDevice(Ours):
    """Builds the model on the device: drawing billions of numbers on the host would take minutes."""

    sections = ZERO_OFFLOAD

    def build_model(self) -> GPT:
        with self.world.device:
            return make_model(self.cell)


def measure_offload(cell: Cell, world: World, steps: int) -> dict[str, Any]:
    """Tokens/s of steps with the optimizer on the host, their peak memory, and the share of the time in Adam's kernels.

    Raises RuntimeError if the plan needs more host memory than there is.
    """
    parameters = sum(parameter.numel() for parameter in make_on_meta(cell).parameters())
    plan = predict(cell, world, ZERO_OFFLOAD, "optimizer", stage=2)
    host = plan.host + 2 * parameters  # and the gradients in bf16, as they arrive
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if host > memory:
        raise RuntimeError(f"the step needs {host / 2**30:.0f} GiB of host memory; there are {memory / 2**30:.0f}")
    on_gpu = world.device.type == "cuda"
    side = _OnDevice(cell, world)
    side.run(1)  # creates the optimizer's state
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with _adam_timed() as spent:
        seconds = side.run(steps)
    side.close()
    return {
        "parameters": parameters,
        "ms": 1000 * seconds / steps,
        "tokens_per_s": steps * cell.micro_batch * cell.accumulation * cell.tokens / seconds,
        "adam_share": sum(spent) / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "planned_bytes": plan.peak,
        "planned_host_bytes": host,
    }


@contextmanager
def _adam_timed() -> Iterator[list[float]]:
    """Collects the seconds of each call that steps masters on the host."""
    spent: list[float] = []

    def timed(*arguments: Any) -> list[Tensor]:
        began = time.perf_counter()
        found = take_step(*arguments)
        spent.append(time.perf_counter() - began)
        return found

    with mock.patch.object(masters, "take_step", timed):
        yield spent
