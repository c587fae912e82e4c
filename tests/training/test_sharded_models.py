"""What a rank at ZeRO stage 3 builds of a large model: the same values, without memory for all of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from job_documents import resolve
from ranks import run_ranks
from simulated_cuda.build import build, find_obstacle
from small_jobs import read_digests
from test_pipelined_jobs import STEPS, TRUST, make_document, run
from test_stage_models import BLOCK, BLOCKS, WIDTH, read_memory

from dsjob.contract import sharding
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import World
from dsjob.training.build import build_engines, build_models
from dsjob.training.sharded_models import divide_evenly
from dsjob.training.stage_models import build_stage_models

WIDE = {"_target_": "pipelined_models.Blocks", "width": WIDTH, "blocks": BLOCKS}


def describe(model: dict[str, Any], folder: str = "out", **sections: Any) -> dict[str, Any]:
    zero = {"stage": 3, **sections.pop("zero_optimization", {})}
    return make_document(
        "layers", folder, model=model, zero_optimization=zero, trainer={"train_batch": 12, "micro_batch": 1}, **sections
    )


def measure(world: World, document: dict[str, Any]) -> tuple[int, int]:
    """The bytes that this process grows by while it builds its part of a model: at most, and at the end."""
    sharding.LEAST_IN_SHARES = 0
    job = complete_job(resolve(document, world_size=world.data_size))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    before = read_memory("VmRSS")
    models = build_stage_models(job, world, TRUST, lambda *_: None)
    gc.collect()
    assert models
    return read_memory("VmHWM") - before, read_memory("VmRSS") - before


def test_a_rank_needs_memory_for_its_share_and_no_more() -> None:
    """Eight blocks of 16 MiB on four ranks: the whole model is 128 MiB, a rank's shards 32, its share 32 more. What is
    imported and allocated once takes about 20 besides."""
    for most, kept in run_ranks(measure, 4, describe(WIDE)):
        assert 1.9 * BLOCK < kept < 4 * BLOCK
        assert most < 6 * BLOCK


def build_both(world: World, documents: list[dict[str, Any]]) -> list[list[str]]:
    """Checks that the shards are those of the whole model, and that the random numbers that follow are the same. What
    is said."""
    told = []
    for document in documents:
        job = complete_job(resolve(document, world_size=world.data_size))
        whole = build_models(job, TRUST)
        after = torch.get_rng_state()
        expected = {name: p.detach().clone() for name, p in whole["model"].named_parameters()}
        sharding.LEAST_IN_SHARES, said = 0, []
        models, _ = build_stage_models(job, world, TRUST, lambda _, text, said=said: said.append(text))
        assert torch.equal(torch.get_rng_state(), after)
        tied = {name for name, _ in models["model"].named_parameters(remove_duplicate=False)}
        assert tied == {name for name, _ in whole["model"].named_parameters(remove_duplicate=False)}
        engines = build_engines(models, job, world, TRUST, steps=1)
        found = {name: value.cpu() for name, value in engines.first.module_state_dict().items()}
        assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in expected.items())
        told.append(said)
    return told


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_rank_has_its_rows_of_the_whole_model_however_it_is_built(ranks: int) -> None:
    documents = [
        describe({"_target_": "pipelined_models.Blocks"}),
        describe({"_target_": "pipelined_models.Blocks", "shares": True}),
        describe({"_target_": "pipelined_models.build_gpt2"}, bf16={"enabled": True}),
        describe({"_target_": "pipelined_models.build_t5"}, zero_optimization={"offload_param": {"device": "cpu"}}),
        describe({"_target_": "pipelined_models.build_llama"}),
        describe({"_target_": "pipelined_models.Blocks", "copies": True}),
    ]
    for told in run_ranks(build_both, ranks, documents):
        assert told[:-1] == [[]] * 5
        reads = "aten.copy_ reads parameters of other ranks while the model is built"
        assert told[-1] == [f"each rank builds the whole model in host memory before it keeps its shards: {reads}"]


@pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")
def test_on_devices_offloaded_shards_stay_on_the_host() -> None:
    documents = [
        describe({"_target_": "pipelined_models.Blocks"}),
        describe({"_target_": "pipelined_models.build_gpt2"}, zero_optimization={"offload_param": {"device": "cpu"}}),
    ]
    assert run_ranks(build_both, 2, documents, library=build()) == [[[], []]] * 2


def train(world: World, documents: list[dict[str, Any]]) -> None:
    for least, document in zip((1 << 40, 0), documents, strict=True):
        sharding.LEAST_IN_SHARES = least
        run(world, [document])


@pytest.mark.full
def test_a_job_trains_and_saves_the_same_bits(tmp_path: Path) -> None:
    model = {"_target_": "pipelined_models.build_layers", "drop": 0.2}
    folders = tmp_path / "whole", tmp_path / "shares"
    run_ranks(train, 2, [describe(model, str(folder)) for folder in folders])
    whole, shares = (read_digests(folder, STEPS) for folder in folders)
    assert shares == whole


def test_shares_are_about_equal_and_in_order() -> None:
    sizes = [5, 1, 1, 1, 8, 0, 4, 4]
    owners = divide_evenly(sizes, 3)
    assert owners == sorted(owners)
    assert [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)] == [
        8,
        8,
        8,
    ]
    assert divide_evenly([0, 0], 4) == [0, 0]
    assert divide_evenly([3], 4) == [1]
