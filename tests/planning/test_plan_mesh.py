"""What `dsjob plan` predicts of jobs on a mesh, against the live tensors and the messages of every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import divided
import pytest
import torch
import torch.distributed as dist
from allocations import count_settled, start_counting
from job_documents import make_job, resolve
from ranks import run_ranks
from torch import Tensor

import dsjob
from dsjob import storage
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import World
from dsjob.training import build, job
from dsjob.trust.grant import Trust

pytestmark = pytest.mark.slow

TRUST = Trust(folders=(str(Path(divided.__file__).parent),))
AXES = ("data", "pipe", "context", "tensor")


def make_document(folder: str, **sections: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 131, "context": divided.LENGTH, "layers": 5, "width": 64, "heads": 4}
    return make_job(
        **{
            "model": {"_target_": "dsjob.recipes.gpt.build", **sizes},
            "data": {"train": {"_target_": "divided.Sequences"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "output": {"dir": folder},
            "trainer": {"micro_batch": 1, "grad_accum": 4, "max_steps": 2, "log_every": 100},
            "checkpoint": {"every": 0, "at_end": False},
            **sections,
        }
    )


class Messages:
    """Counts the bytes that this rank sends along each axis, as ring algorithms do."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.axes: dict[Any, str] = {}
        self._watch("all_reduce", lambda x, *_: x.nbytes, 2)
        self._watch("all_to_all_single", lambda x, *_: x.nbytes, 1)
        self._watch("all_gather", lambda parts, *_: sum(part.nbytes for part in parts), 1)
        self._watch("isend", lambda x, *_: x.nbytes, 0)

    def _watch(self, name: str, measure: Any, rounds: int) -> None:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            ranks = dist.get_world_size(group)
            share = rounds * (ranks - 1) / ranks if rounds else 1
            self.sent[self.axes.get(group, "other")] += round(measure(*args) * share)
            return real(*args, **kwargs)

        setattr(dist, name, call)


class Kept:
    """Counts the bytes that autograd keeps, but not of parameters and of the batch."""

    def __init__(self) -> None:
        self.most = 0
        self.parameters: set[int] = set()
        self._live: Counter[tuple[int, int]] = Counter()  # by storage and its size: how often it is kept

    def pack(self, tensor: Tensor) -> Held | Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in self.parameters or tensor.dtype == torch.int64:
            return tensor
        key = storage._cdata, storage.nbytes()
        self._live[key] += 1
        self.most = max(self.most, sum(size for _, size in self._live))
        return Held(tensor, lambda: self._drop(key))

    def _drop(self, key: tuple[int, int]) -> None:
        self._live[key] -= 1
        if not self._live[key]:
            del self._live[key]

    def unpack(self, held: Held | Tensor) -> Tensor:
        return held.tensor if isinstance(held, Held) else held


class Held:
    def __init__(self, tensor: Tensor, drop: Callable[[], None]) -> None:
        self.tensor, self._drop = tensor, drop

    def __del__(self) -> None:
        self._drop()


def watch(world: World, document: dict[str, Any]) -> dict[str, int]:
    """Of this rank in the second step of a job: its stage, the live bytes before the optimizer steps, the bytes that
    autograd keeps at most, and those sent along each axis since the first step."""
    start_counting()
    messages, kept, found = Messages(), Kept(), dict.fromkeys(("stage", "live", "kept", *AXES), 0)
    real_divide, real_build = build.divide_ranks, build.build_engines

    def divide_ranks(*args: Any) -> World:
        made = real_divide(*args)
        found["stage"] = made.pipe.rank
        axes = {"data": made.data, "pipe": made.pipe, "context": made.context, "tensor": made.tensor}
        messages.axes |= {ranks.group: axis for axis, ranks in axes.items() if ranks.size > 1}
        return made

    def build_engines(*args: Any, **kwargs: Any) -> Any:
        engines = real_build(*args, **kwargs)
        kept.parameters |= {p.untyped_storage()._cdata for p in engines.first.module.parameters()}
        step = engines.first.optimizer.step

        def watched(*given: Any) -> Any:
            found.update({**messages.sent, "live": count_settled(), "kept": kept.most})
            messages.sent.clear()
            return step(*given)

        engines.first.optimizer.step = watched
        return engines

    build.divide_ranks, build.build_engines = divide_ranks, build_engines  # type: ignore[assignment]
    resolved = resolve(document, world_size=world.everyone.size)
    storage.make_folder(resolved["output"]["dir"])
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        job.run_job(complete_job(resolved), resolved["output"]["dir"], world, TRUST)
    return found


BF16 = {"bf16": {"enabled": True}}
TENSOR = {"tensor_parallel": {"size": 2}}
CONTEXT = {"context_parallel": {"size": 2}}
STAGES = {"pipeline": {"stages": 2}}
AGAIN = {"activation_checkpointing": {"mode": "full"}}
CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages and tensor": (4, {**STAGES, **TENSOR, **BF16}),
    "context": (2, CONTEXT),
    "mesh": (8, {**STAGES, **TENSOR, **BF16}),
    "gpipe": (4, {"pipeline": {"stages": 2, "schedule": "gpipe"}}),
    "interleaved": (2, {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}, **BF16}),
    "sequences": (2, {"tensor_parallel": {"size": 2, "sequence_parallel": True}}),
    "stages and ZeRO 2": (4, {**STAGES, "zero_optimization": {"stage": 2}}),
    "stages and ZeRO 3": (4, {**STAGES, **BF16, "zero_optimization": {"stage": 3}}),
    "recomputed": (2, {**TENSOR, **AGAIN}),
    "recomputed stages": (4, {**STAGES, **TENSOR, **AGAIN}),
    "context and tensor": (8, {**CONTEXT, **TENSOR, **AGAIN, "zero_optimization": {"stage": 3}}),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.full(*(name for name in CELLS if name != "stages and tensor"))
def test_a_plan_of_a_mesh_is_what_every_rank_holds_and_sends(name: str, tmp_path: Path) -> None:
    ranks, sections = CELLS[name]
    document = make_document(str(tmp_path / "run"), **sections)
    plan = dsjob.plan(document, world_size=ranks, trust=["divided"])
    found = run_ranks(watch, ranks, document)
    assert {rank["stage"] for rank in found} == set(range(len(plan.jobs)))
    for rank in found:
        planned = plan.jobs[rank["stage"]]
        assert planned.memory().states == pytest.approx(rank["live"], rel=0.05)
        if "zero_optimization" not in sections and "activation_checkpointing" not in sections:
            # Autograd does not keep the outputs of a stage, which the plan counts.
            assert planned.activations == pytest.approx(rank["kept"], rel=0.1)
    sent = Counter[str]()
    for transfer in plan.communication:
        sent[transfer.axis] += transfer.sent
    own = [rank for rank in found if rank["stage"] == plan.stage]
    for axis in AXES:
        measured = max(rank[axis] for rank in (found if axis == "pipe" else own))
        assert sent[axis] == pytest.approx(measured, rel=0.02), axis
