"""Models whose sequences ranks divide among them, against plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from divided import LENGTH, MODELS, build_gpt, build_gpt2, build_llama, build_t5, make_batch, train_alone
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow

ROWS, STEPS = 8, 20
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6}}
Cell = tuple[int, int, int]  # ZeRO stage, ranks that divide sequences, ranks that divide layers


def make_engine(model: nn.Module, cell: Cell, **more: Any) -> Engine:
    stage, context, tensor = cell
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "sequence_parallel_size": context,
        "tensor_parallel": {"size": tensor, "sequence_parallel": tensor > 1 and stage == 1},
        **more,
    }
    return dsjob.initialize(model=model, config=config)[0]


def train(engine: Engine, steps: int, *, ours: bool) -> dict[str, Any]:
    """Mean losses over all ranks, norms, and final weights."""
    losses, norms = [], []
    data, rank = engine.world.data_size, engine.world.data_rank
    for step in range(steps):
        batch, total = make_batch(step, ROWS, ours=ours), torch.zeros(())
        for micro in range(2):
            place = micro * data + rank
            loss = engine(**{name: tensor.chunk(2 * data)[place] for name, tensor in batch.items()})["loss"]
            engine.backward(loss)
            engine.step()
            total += loss.detach() / 2 / torch.distributed.get_world_size()
        torch.distributed.all_reduce(total)
        losses.append(float(total))
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "weights": dict(engine.module_state_dict())}


def run_cells(world: World, name: str, cells: list[Cell], steps: int, more: Mapping[str, Any]) -> dict[Cell, Any]:
    return {cell: train(make_engine(MODELS[name](), cell, **more), steps, ours=name == "gpt") for cell in cells}


def compare(name: str, world_size: int, cells: list[Cell], steps: int, **more: Any) -> None:
    alone = train_alone(name, steps, ROWS)
    for rank in run_ranks(run_cells, world_size, name, cells, steps, more):
        for cell, found in rank.items():
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5), (name, cell)
            assert found["norms"] == pytest.approx(alone["norms"], rel=2e-5), (name, cell)
            for key, weight in alone["weights"].items():
                torch.testing.assert_close(found["weights"][key], weight, rtol=0, atol=2e-5, msg=f"{cell} {key}")


def test_losses_equal_those_of_one_process() -> None:
    compare("llama", 4, [(0, 2, 1), (1, 2, 2)], 4)
    compare("gpt2", 2, [(0, 2, 1)], 4, activation_checkpointing={"mode": "full"})


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "tied llama"])
@pytest.mark.parametrize("world_size", [4, 8])
def test_losses_equal_those_of_one_process_everywhere(name: str, world_size: int) -> None:
    sizes = [(2, 1), (4, 1), (2, 2)] if "llama" not in name else [(2, 1), (4, 1)]
    compare(name, world_size, [(stage, *size) for stage in range(4) for size in sizes], STEPS)


def resume(world: World, folder: str) -> list[tuple[Any, Any]]:
    """Losses of runs, and of those that go on from their checkpoints in another layout."""
    found = []
    for number, (saved, loaded) in enumerate((((1, 2, 2), (0, 1, 1)), ((0, 1, 1), (3, 4, 1)))):
        engine = make_engine(build_gpt(), saved)
        train(engine, 2, ours=True)
        engine.save_checkpoint(f"{folder}/{number}")
        again = make_engine(build_gpt(), loaded)
        again.load_checkpoint(f"{folder}/{number}")
        found.append((train(engine, 2, ours=True)["losses"], train(again, 2, ours=True)["losses"]))
    return found


@pytest.mark.full
def test_checkpoints_load_into_other_layouts(tmp_path: Path) -> None:
    for expected, found in run_ranks(resume, 4, str(tmp_path))[0]:
        assert found == pytest.approx(expected, rel=1e-5)


def mask_documents(world: World, context: int) -> tuple[list[float], Tensor]:
    """Losses of a model whose rows hold two documents each, which do not see each other."""
    engine = make_engine(build_llama(), (0, context, 1), train_batch_size=2, gradient_accumulation_steps=1)
    places = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)
    of = torch.tensor([0] * 5 + [1] * (LENGTH - 5))
    mask = ((of[:, None] == of) & torch.ones(LENGTH, LENGTH).tril().bool()).expand(2, 1, -1, -1)
    losses = []
    for step in range(3):
        given = {**make_batch(step, 2, ours=False), "position_ids": places, "attention_mask": mask}
        share = {name: tensor.chunk(engine.world.data_size)[engine.world.data_rank] for name, tensor in given.items()}
        loss = engine(**share)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    found = torch.stack(losses)
    torch.distributed.all_reduce(found)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=given["input_ids"], position_ids=places, attention_mask=mask)["logits"]
    return (found / world.data_size).tolist(), logits


def test_masks_of_documents_hold() -> None:
    (divided, logits), _ = run_ranks(mask_documents, 2, 2)
    (whole, expected), _ = run_ranks(mask_documents, 2, 1)
    assert divided == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def watch_drops(world: World) -> tuple[list[Tensor], list[Tensor]]:
    """Which activations of a block and of the embedding each rank drops."""
    torch.manual_seed(11)
    engine = make_engine(build_gpt2(0.4), (0, 2, 1), train_batch_size=4)
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    engine.module.transformer.h[0].mlp.dropout.register_forward_hook(lambda _, args, output: inside.append(output == 0))
    engine.module.transformer.drop.register_forward_hook(lambda _, args, output: outside.append(output == 0))
    for _ in range(2):
        engine.backward(engine(**make_batch(0, 2, ours=False))["loss"])
        engine.step()
    return inside, outside


def test_ranks_drop_different_activations_of_their_parts() -> None:
    (inside, outside), (others, same) = run_ranks(watch_drops, 2)
    assert all(map(torch.equal, outside, same))
    for one, other in zip(inside, others, strict=True):
        assert one.shape == (2, LENGTH // 2, 32)
        assert 0.4 < float((one ^ other).float().mean()) < 0.6
    assert not torch.equal(inside[0], inside[1])


def refuse(world: World) -> dict[str, str]:
    told: dict[str, str] = {}

    def call(name: str, action: Any) -> None:
        with pytest.raises(UsageError) as caught:
            action()
        told[name] = f"{caught.value.message}. {caught.value.hint}"

    engine = make_engine(build_gpt(), (0, 2, 1))
    call("length", lambda: engine(torch.zeros(1, LENGTH - 1, dtype=torch.int64), torch.zeros(1, LENGTH - 1)))
    call("stacks", lambda: make_engine(build_t5(), (0, 2, 1)))
    eager = build_gpt2()
    eager.set_attn_implementation("eager")
    call("eager", lambda: make_engine(eager, (0, 2, 1)))
    with_own = build_gpt()
    for block in with_own.blocks:
        block._attend = lambda x: x
    without = make_engine(with_own, (0, 2, 1))
    call("own", lambda: without(torch.zeros(1, LENGTH, dtype=torch.int64)))
    joined = build_gpt()
    for block in joined.blocks:
        block._attend = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)
    without_heads = make_engine(joined, (0, 2, 1))
    call("layout", lambda: without_heads(torch.zeros(1, LENGTH, dtype=torch.int64)))
    config = {"train_batch_size": 2, "optimizer": ADAM}
    call("mesh", lambda: dsjob.initialize(model=build_gpt(), config=config, mesh_param=(2, 2)))
    assert dsjob.initialize(model=build_gpt(), config=config, mesh_param=(1, 2))[0].world.context.size == 2
    return told


def test_what_cannot_be_divided_is_refused_with_reasons() -> None:
    told = run_ranks(refuse, 2)[0]
    assert "context_parallel.size is 2, which does not divide a sequence of 11" in told["length"]
    assert "several stacks of blocks" in told["stacks"]
    assert "it computes it with eager" in told["eager"]
    assert "its blocks do not call scaled_dot_product_attention" in told["own"]
    assert "it is called with [1, 6, 32], not with [batch, heads, 6, features]" in told["layout"]
    assert "mesh_param=(2, 2) does not describe 2 ranks" in told["mesh"]
