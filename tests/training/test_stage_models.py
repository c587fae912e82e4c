"""What a rank of a pipeline builds: the values of its stage, in the memory of its stage."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pipelined_models
import pytest
import torch
from job_documents import resolve
from pipelined_models import Rows
from ranks import run_ranks
from test_pipelined_jobs import TRUST, make_document

from dsjob.contract.resolved import ResolvedJob
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import World
from dsjob.training.build import build_models, divide_ranks
from dsjob.training.pipelines import build_passes
from dsjob.training.stage_models import build_stage_models

WIDTH, BLOCKS = 1024, 8
BLOCK = 4 * (4 * WIDTH * WIDTH + 5 * WIDTH)  # bytes


def read_memory(name: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(name)) << 10


def measure(world: World, document: dict[str, Any], whole: bool) -> tuple[int, int, list[str]]:
    """The bytes that this process grows by, at most and at the end, while it builds its stage; and what is said. whole:
    only the first rank builds, and all of the model."""
    job: ResolvedJob = complete_job(resolve(document, world_size=world.everyone.size))
    world = divide_ranks(job.spec, world, TRUST)
    said: list[str] = []
    batch = next(iter(torch.utils.data.DataLoader(Rows(), batch_size=2)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    before = read_memory("VmRSS")
    if whole:
        kept: Any = build_models(job, TRUST) if world.pipe.rank == 0 else None
    else:
        models, complete = build_stage_models(job, world, TRUST, lambda _, told: said.append(told))
        kept = build_passes(models, job.spec, world, TRUST, lambda: batch, complete), models
    gc.collect()
    found = read_memory("VmHWM") - before, read_memory("VmRSS") - before, said
    del kept
    return found


def describe(kind: str, model: dict[str, Any], **pipeline: Any) -> dict[str, Any]:
    target = {"_target_": f"pipelined_models.{kind}", **model}
    return make_document("layers", "out", model=target, pipeline={"stages": 2, **pipeline})


def test_a_rank_needs_memory_for_its_stage_and_no_more() -> None:
    """Eight blocks of 16 MiB in four stages: 139 MiB at most before, 46 MiB now, of which the model has 32."""
    document = describe("Blocks", {"width": WIDTH, "blocks": BLOCKS}, stages=4)
    assert run_ranks(measure, 4, document, True)[0][0] > BLOCKS * BLOCK
    for most, kept, said in run_ranks(measure, 4, document, False):
        assert 1.9 * BLOCK < kept < 3 * BLOCK
        assert most < 3.5 * BLOCK
        assert said == []


def build_both(world: World, documents: list[dict[str, Any]], batch: Any = None) -> list[list[str]]:
    """Checks that the parameters of a stage are those of the whole model, and that the random numbers that follow are
    the same. What is said."""
    told = []
    batch = batch or next(iter(torch.utils.data.DataLoader(Rows(), batch_size=2)))
    for document in documents:
        job = complete_job(resolve(document, world_size=world.everyone.size))
        whole = dict(build_models(job, TRUST)["model"].named_parameters())
        after = torch.get_rng_state()
        divided = divide_ranks(job.spec, world, TRUST)
        said: list[str] = []
        models, complete = build_stage_models(job, divided, TRUST, lambda _, text, said=said: said.append(text))
        assert torch.equal(torch.get_rng_state(), after)
        passes = build_passes(models, job.spec, divided, TRUST, lambda: batch, complete)
        assert torch.equal(torch.get_rng_state(), after)
        assert passes is not None
        own = {name for name, ranks in passes.stage.owners.items() if divided.pipe.rank in ranks}
        found = dict(models["model"].named_parameters())
        assert found.keys() == own
        assert own < whole.keys()
        assert all(torch.equal(parameter, whole[name]) for name, parameter in found.items())
        told.append(said)
    return told


def test_a_stage_has_the_values_of_the_whole_model_however_it_is_built() -> None:
    documents = [
        describe("Blocks", {}),
        describe("Blocks", {}, schedule="interleaved", chunks=2),
        describe("Blocks", {"shares": True}),  # the last stage learns from the trace that it needs the first layer
        describe("build_layers", {}, partition="uniform"),
        describe("build_layers", {}, partition="time"),
        describe("Blocks", {"copies": True}),
    ]
    start = "each rank builds the whole model in host memory before it keeps its stage: "
    for told in run_ranks(build_both, 2, documents):
        assert told[:4] == [[]] * 4
        assert told[4] == [f"{start}partition time measures all layers"]
        assert told[5] == [f"{start}aten.copy_ reads parameters of other ranks while the model is built"]


def build_pretrained(world: World, document: dict[str, Any], folder: str) -> list[list[str]]:
    if world.everyone.rank == 0:
        pipelined_models.build_llama().save_pretrained(folder)  # type: ignore[operator]
    torch.distributed.barrier()
    return build_both(world, [document], {"input_ids": torch.ones(2, 8, dtype=torch.int64)})


@pytest.mark.full
def test_a_stage_of_a_pretrained_model_has_its_values(tmp_path: Path) -> None:
    model = {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "_args_": [str(tmp_path)]}
    document = make_document("llama", "out", model=model, pipeline={"stages": 2})
    assert run_ranks(build_pretrained, 2, document, str(tmp_path)) == [[[]], [[]]]
