"""Models whose layers ranks divide among them, against plain PyTorch on one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from divided import MODELS, build_gpt, build_gpt2, build_llama, make_batch, train_alone
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.parallel.tensor import regions
from dsjob.parallel.tensor.plans import find_plan, match, read_plan
from dsjob.ranks.mesh import Ranks, World
from dsjob.ranks.splits import Split
from dsjob.torch_private import imagining_ranks

pytestmark = pytest.mark.slow

ROWS, STEPS = 8, 20
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6}}
Outcome = dict[str, Any]


def make_engine(model: nn.Module, stage: int, size: int, section: Mapping[str, Any] = {}, **more: Any) -> Engine:
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
        "gradient_clipping": 1.0,
        "tensor_parallel": {"size": size, **section},
        **more,
        "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})},
    }
    return dsjob.initialize(model=model, config=config)[0]


def train(engine: Engine, steps: int, *, ours: bool) -> Outcome:
    """Losses of this rank's part of each batch, norms, and the final weights, whole."""
    losses, norms = [], []
    data, rank = engine.world.data_size, engine.world.data_rank
    for step in range(steps):
        batch, total = make_batch(step, ROWS, ours=ours), 0.0
        for micro in range(2):
            place = micro * data + rank
            loss = engine(**{name: tensor.chunk(2 * data)[place] for name, tensor in batch.items()})["loss"]
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / 2
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "weights": dict(engine.module_state_dict())}


def run_cells(
    world: World, name: str, cells: list[tuple[int, int]], steps: int, section: Mapping[str, Any]
) -> dict[tuple[int, int], Outcome]:
    def run(stage: int, size: int) -> Outcome:
        return train(make_engine(MODELS[name](), stage, size, section), steps, ours=name == "gpt")

    return {cell: run(*cell) for cell in cells}


def mean_losses(ranks: list[Outcome], size: int) -> list[float]:
    """Those of whole batches: the ranks of a group have the same."""
    firsts = ranks[::size]
    for number, rank in enumerate(ranks):
        assert rank["losses"] == firsts[number // size]["losses"]
    return [sum(losses) / len(firsts) for losses in zip(*(rank["losses"] for rank in firsts), strict=True)]


def compare(name: str, world_size: int, cells: list[tuple[int, int]], steps: int, **section: Any) -> None:
    alone = train_alone(name, steps, ROWS)
    found = run_ranks(run_cells, world_size, name, cells, steps, section)
    for stage, size in cells:
        ranks = [result[stage, size] for result in found]
        assert mean_losses(ranks, size) == pytest.approx(alone["losses"], rel=1e-5), (name, stage, size)
        for rank in ranks:
            assert rank["norms"] == pytest.approx(alone["norms"], rel=2e-5), (name, stage, size)
            for key, weight in alone["weights"].items():
                torch.testing.assert_close(rank["weights"][key], weight, rtol=0, atol=2e-5, msg=f"{stage} {key}")


def test_losses_equal_those_of_one_process() -> None:
    compare("gpt", 4, [(0, 2), (3, 2), (0, 4)], 4)
    compare("tied llama", 4, [(2, 2)], 4)


def test_parts_of_sequences_and_of_the_vocabulary_change_nothing() -> None:
    compare("gpt2", 2, [(1, 2)], 4, sequence_parallel=True, loss_parallel=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "tied llama"])
def test_parts_of_sequences_and_of_the_vocabulary_change_nothing_in_other_models(name: str) -> None:
    both = {"sequence_parallel": True, "loss_parallel": name != "gpt"}
    for section in (both, {"sequence_parallel": True}, {"loss_parallel": True}):
        if section != {"loss_parallel": True} or name != "gpt":
            compare(name, 4, [(0, 2), (3, 2)], STEPS, **section)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_losses_equal_those_of_one_process_everywhere(name: str, world_size: int) -> None:
    sizes = [size for size in (2, 4) if size <= min(world_size, 2 if "llama" in name else 4)]
    compare(name, world_size, [(stage, size) for stage in range(4) for size in sizes], STEPS)


def watch_drops(world: World, recompute: bool) -> dict[str, list[Tensor]]:
    """Which activations each rank drops in the attention, in a divided layer, and after the blocks, in two passes."""
    torch.manual_seed(11)
    more = {"activation_checkpointing": {"mode": "full"}} if recompute else {}
    engine = make_engine(build_gpt2_with_dropout(), 0, 2, train_batch_size=4, **more)
    drops: dict[str, list[Tensor]] = {"inside": [], "outside": []}
    blocks = engine.module.transformer.h
    blocks[0].mlp.act.register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.5))
    blocks[0].mlp.c_proj.register_forward_pre_hook(lambda _, args: drops["inside"].append(args[0] == 0))
    blocks[0].attn.resid_dropout.register_forward_hook(lambda _, args, output: drops["outside"].append(output == 0))
    rows = make_batch(0, 2, ours=False)
    for _ in range(2):
        engine.backward(engine(**rows)["loss"])
        engine.step()
    return {place: [drop.clone() for drop in found] for place, found in drops.items()}


def build_gpt2_with_dropout() -> nn.Module:
    return build_gpt2(0.4)


@pytest.mark.parametrize("recompute", [False, True])
def test_ranks_drop_the_same_outside_and_different_activations_inside(recompute: bool) -> None:
    first, second = run_ranks(watch_drops, 2, recompute)
    passes = 2 * (1 + recompute)
    assert len(first["inside"]) == len(first["outside"]) == passes
    for one, other in zip(first["inside"], second["inside"], strict=True):
        assert 0.4 < float((one ^ other).float().mean()) < 0.6
    for one, other in zip(first["outside"], second["outside"], strict=True):
        assert torch.equal(one, other)
        assert 0.3 < float(one.float().mean()) < 0.5
    for drops in (first, second):
        for found in drops.values():
            # The passes of two micro steps draw different numbers, and a recomputation the same again.
            assert not torch.equal(found[0], found[-1])
            assert not recompute or torch.equal(found[0], found[1])


# Stage, config, tolerance of losses. Precisions are in tests/training/test_mesh_grid.py.
VARIANTS: dict[str, tuple[int, dict[str, Any], float]] = {
    "recomputed": (2, {"activation_checkpointing": {"mode": "full", "partition_activations": True}}, 1e-6),
    "selective": (0, {"activation_checkpointing": {"mode": "selective"}}, 1e-6),
    "offloaded": (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 1e-6),
    "offloaded parameters": (3, {"zero_optimization": {"offload_param": {"device": "cpu"}}}, 1e-6),
    "Lamb": (0, {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, 1e-5),
    "Lamb sharded": (3, {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, 1e-5),
    "Muon": (0, {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}, 1e-4),
    "Muon sharded": (3, {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}, 1e-4),
    "Lion": (1, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, 1e-4),
    "sum": (1, {"gradient_allreduce_op": "sum", "gradient_clipping": 0.5}, 1e-4),
}


def run_variants(world: World, names: list[str]) -> dict[str, tuple[list[float], list[float]]]:
    """For each variant: losses of ranks that divide layers, and of all ranks as data-parallel ones; of both, the mean
    over this job's ranks."""
    found = {}
    for name in names:
        stage, config, _ = VARIANTS[name]
        pair = []
        for size in (2, 1):
            losses = torch.tensor(train(make_engine(build_gpt(), stage, size, **config), 4, ours=True)["losses"])
            torch.distributed.all_reduce(losses)
            pair.append((losses / world.data_size).tolist())
        found[name] = (pair[0], pair[1])
    return found


@pytest.mark.parametrize("names", [["recomputed", "Lamb"], list(VARIANTS)], ids=["some", "all"])
@pytest.mark.full
def test_variants_equal_data_parallel_training(names: list[str]) -> None:
    found = run_ranks(run_variants, 2 if names != list(VARIANTS) else 4, names)[0]
    for name, (divided, whole) in found.items():
        assert divided == pytest.approx(whole, rel=VARIANTS[name][2]), name


class Plain(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


class Unit:
    """An mpu that divides no layers."""

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


class Scaled(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        """Does nothing."""


def refuse(world: World) -> dict[str, str]:
    told: dict[str, str] = {}

    def call(name: str, model: nn.Module, plan: Any = None, size: int = 2, **given: Any) -> None:
        section = {"size": size, **({"plan": plan} if plan else {})}
        config = {
            "train_batch_size": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "tensor_parallel": section,
        }
        with pytest.raises(UsageError) as caught:
            dsjob.initialize(model=model, config=config, **given)
        told[name] = f"{caught.value.message}. {caught.value.hint}"

    pair = {"first": "colwise", "second": "rowwise"}
    call("no plan", Plain())
    call("unused", Plain(), {"frist": "colwise"})
    call("odd", Plain(), {**pair, "odd": "colwise"})
    call("nothing", Plain(), {"first": "replicate"})
    call("heads", build_llama(), size=4)
    call("no layer", nn.Sequential(nn.Linear(4, 4), nn.GELU()), {"0": "colwise", "1": "rowwise"})
    adapted = Plain()
    adapted.first.base_layer = nn.Linear(4, 6)
    call("adapter", adapted, pair)
    call("attribute", Plain(), {**pair, "odd": {"divide": ["heads"]}})
    call("ranks", Plain(), pair, size=3)
    call("optimizer", Plain(), pair, optimizer=lambda parameters: Scaled(parameters, {}))
    call("mpu", Plain(), pair, mpu=Unit())
    engine = dsjob.initialize(
        model=Plain(),
        config={"train_batch_size": 2, "tensor_parallel": {"size": 2, "plan": {"second": "rowwise"}}},
    )[0]
    with pytest.raises(UsageError) as caught:
        engine(torch.ones(2, 4))
    told["whole"] = f"{caught.value.message}. {caught.value.hint}"
    return told


def test_what_cannot_be_divided_is_refused_with_reasons() -> None:
    told = run_ranks(refuse, 4)[0]
    assert "tensor_parallel.size is 2, but Plain has no plan" in told["no plan"]
    assert "plan: {first: colwise, second: rowwise}" in told["no plan"]
    assert "first (4 -> 6), second (6 -> 4)" in told["no plan"]
    assert "frist matches no module of Plain. its modules are called first, second, odd" in told["unused"]
    assert "odd has 5 outputs, which do not divide among 2 ranks" in told["odd"]
    assert "divides no layer of Plain" in told["nothing"]
    assert "tensor_parallel.size is 4, but the model has num_key_value_heads 2" in told["heads"]
    assert "1 is a GELU, which is no linear layer" in told["no layer"]
    assert "first has an adapter, which no plan of a model knows. write tensor_parallel.plan" in told["adapter"]
    assert "odd has no number heads" in told["attribute"]
    assert "do not divide into groups of 3" in told["ranks"]
    assert "Scaled would see only this rank's parts" in told["optimizer"]
    assert "an mpu, and tensor_parallel divides the ranks in another way" in told["mpu"]
    assert "second received inputs of width 6, but its part has 3 of 6" in told["whole"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.*.q", ["model.layers.0.attention.q", "model.layers.1.attention.q"]),
        ("attention.q", ["model.layers.0.attention.q", "model.layers.1.attention.q"]),
        ("layers.*", ["model.layers.0", "model.layers.1"]),
        ("ention.q", []),
    ],
)
def test_patterns_match_ends_of_names(pattern: str, found: list[str]) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({"q": nn.Linear(2, 2)})

    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})})
    assert list(match(model, read_plan({pattern: "colwise"}))) == found


def test_a_plan_of_a_model_leaves_out_a_head_tied_to_what_it_does_not_divide() -> None:
    class Tied(Plain):
        tp_plan: ClassVar = {"first": "colwise", "second": "rowwise", "head": "colwise_gather"}

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

    model = Tied()
    assert list(match(model, find_plan(model, None) or {})) == ["first", "second", "head"]
    model.head.weight = model.tokens.weight
    assert list(match(model, find_plan(model, None) or {})) == ["first", "second"]


@pytest.mark.parametrize(("length", "ranks", "sections"), [(12, 2, 3), (12, 4, 1), (7, 2, 1), (3, 4, 1)])
def test_boxes_of_all_ranks_cover_a_parameter_once(length: int, ranks: int, sections: int) -> None:
    whole = torch.arange(5.0 * length).view(length, 5)
    for rows in (1, 2, 3):  # as shards over other ranks cut a part further
        seen = torch.zeros_like(whole)
        for rank in range(ranks):
            split = Split(0, length, Ranks(rank, ranks), sections)
            part = split.take(whole)
            assert split.shape(part.shape) == whole.shape
            for first in range(0, len(part), rows):
                shard = part[first : first + rows]
                for there, inside, sizes in split.boxes([first, 0], shard.shape):
                    box = shard[inside[0] : inside[0] + sizes[0]]
                    assert torch.equal(box, whole[there[0] : there[0] + sizes[0]])
                    seen[there[0] : there[0] + sizes[0]] += 1
        assert bool((seen == 1).all())


def test_inputs_of_divided_layers_are_freed() -> None:
    layer, freed = nn.Linear(4, 4), []
    with imagining_ranks(2):
        ranks = Ranks(0, 2, dist.group.WORLD)
        x = layer(torch.ones(3, 4))
        weakref.finalize(x, freed.append, True)
        (layer(regions.enter(x, ranks)) + layer(regions.enter(x, ranks))).sum().backward()
        del x
        gc.collect()
    assert freed
