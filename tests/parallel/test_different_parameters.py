"""Ranks that use different parameters of a model: experts, blocks that one rank skips or repeats, heads in turn.

A parameter without a gradient on one rank counts as zero there. One that no rank has used is left alone, weight decay
included. The reference is a plain loop in one process over all ranks' batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pipelines
import pytest
import torch
from ranks import run_ranks
from simulated_cuda.build import build as build_device
from simulated_cuda.build import find_obstacle
from torch import Tensor, nn

import dsjob
from dsjob.contract import sharding
from dsjob.deepspeed.pipe import LayerSpec, TiedLayerSpec
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.parallel.partial_sums import add_partial
from dsjob.ranks.mesh import World

WIDTH, STEPS = 8, 6
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Routed(nn.Module):
    """Sends each batch to one of three experts of equal size."""

    def __init__(self, expert: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([expert() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, route: int) -> Tensor:
        return self.head(torch.relu(self.experts[route](torch.relu(self.first(x))))).square().mean()


class Deep(nn.Module):
    """Blocks; `route` says how often the second one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Mlp() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, route: int) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            for _ in range(route if number == 1 else 1):
                x = block(x)
        return self.head(x).square().mean()


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor, route: int) -> Tensor:
        return x + self.experts[route % 2](x)


class RoutedBlocks(nn.Module):
    """Blocks that all ranks call, each with experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([RoutedBlock() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, route: int) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, route >> number)
        return self.head(x).square().mean()


class Branches(nn.Module):
    """Two towers, defined in the order in which they are not called; `route` chooses between them, or takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.ModuleList([Mlp(), Mlp()])
        self.left = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, route: int) -> Tensor:
        left = right = x
        if route != 1:
            left = self.left[1](self.left[0](x))
        if route != 2:
            right = self.right[1](self.right[0](x))
        return self.head(left * right).square().mean()


class Heads(nn.Module):
    """A body with two heads, which are trained in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 1)})
        self.spare = nn.Linear(WIDTH, WIDTH)  # which nothing uses

    def forward(self, x: Tensor, route: int) -> Tensor:
        return self.heads["ab"[route]](self.body(x)).square().mean()


def build_mlp_experts() -> nn.Module:
    return Routed(Mlp)


# By name: the model, and the route of a micro batch, by its step, micro step and rank.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], int]]] = {
    "experts": (Routed, lambda step, micro, rank: (step + micro + rank) % 3),
    "own experts": (Routed, lambda step, micro, rank: rank % 3),
    "large experts": (build_mlp_experts, lambda step, micro, rank: (2 * step + micro + rank) % 3),
    "routed blocks": (RoutedBlocks, lambda step, micro, rank: step + micro + 3 * rank),
    "skipped block": (Deep, lambda step, micro, rank: int(rank != step % 2)),
    "repeated block": (Deep, lambda step, micro, rank: (step + micro + 2 * rank) % 4),
    "branches": (Branches, lambda step, micro, rank: (step + micro + rank) % 3),
    "heads": (Heads, lambda step, micro, rank: step // 2 % 2),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def make_batch(name: str, step: int, micro: int, rank: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator), MODELS[name][1](step, micro, rank)


def train_by_hand(name: str, ranks: int, accumulation: int) -> dict[str, Tensor]:
    """The weights after training in one process."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(ranks):
                (model(*make_batch(name, step, micro, rank)) / accumulation / ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.named_parameters()}


def make_engine(name: str, stage: int, accumulation: int, **config: Any) -> Engine:
    zero = {"stage": stage, **config.pop("zero_optimization", {})}
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, "optimizer": ADAMW}
    base |= {"gradient_clipping": 1.0, "zero_optimization": zero}
    return dsjob.initialize(model=build(name), config={**base, **config})[0]


def train(world: World, name: str, stage: int, accumulation: int, config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after training on the ranks."""
    sharding.SMALL_BLOCK = 1  # also small blocks are units of their own at stages 1 and 2
    engine = make_engine(name, stage, accumulation, **config)
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(*make_batch(name, step, micro, world.data_rank)))
            engine.step()
    return engine.module_state_dict()


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key].float(), value.float(), rtol=0, atol=tolerance, msg=key)


# At stage 3, each use of a block gathers it: ranks must use the same ones.
STAGES = {name: range(3) for name in ("large experts", "skipped block", "repeated block", "branches")}


def train_stages(world: World, name: str, accumulation: int) -> list[dict[str, Tensor]]:
    return [train(world, name, stage, accumulation, {}) for stage in STAGES.get(name, range(4))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.full)])
def test_ranks_train_as_one_process(name: str, ranks: int, accumulation: int) -> None:
    expected = train_by_hand(name, ranks, accumulation)
    for stages in run_ranks(train_stages, ranks, name, accumulation):
        for found in stages:
            compare(found, expected)


# Momentum, not Adam, which turns small differences of small gradients into whole steps.
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
HOST = {"device": "cpu"}
# Compared with stage 0 in the same precision: models, stage, config, tolerance of weights.
VARIANTS: dict[str, tuple[list[str], int, dict[str, Any], float]] = {
    "bf16, stage 1": (["experts", "repeated block"], 1, BF16, 2e-3),
    "bf16, stage 2": (["skipped block", "heads"], 2, BF16, 2e-3),
    "bf16, stage 3": (["experts"], 3, BF16, 2e-3),
    "sums in fp32": (["experts", "skipped block"], 1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, 2e-3),
    "sums in bf16": (["experts", "heads"], 2, {"data_types": {"grad_accum_dtype": "bf16"}}, 4e-3),
    "fp16, stage 1": (["skipped block"], 1, FP16, 1e-3),
    "fp16, stage 3": (["experts"], 3, FP16, 1e-3),
    "autocast, stage 1": (["experts"], 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 4e-3),
    "autocast, stage 2": (["repeated block"], 2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 4e-3),
    "recomputed": (["skipped block", "repeated block"], 2, {"activation_checkpointing": {"mode": "full"}}, 1e-6),
    "recomputed, stage 3": (["routed blocks"], 3, {"activation_checkpointing": {"mode": "full"}}, 1e-6),
    "compiled": (["skipped block", "routed blocks"], 1, {"compile": {"enabled": True, "backend": "eager"}}, 1e-6),
    "offloaded": (["experts", "branches"], 2, {"zero_optimization": {"offload_optimizer": HOST}}, 1e-6),
    "offloaded in bf16": (["repeated block"], 1, {**BF16, "zero_optimization": {"offload_optimizer": HOST}}, 2e-3),
    "offloaded parameters": (["routed blocks", "heads"], 3, {"zero_optimization": {"offload_param": HOST}}, 1e-6),
    "communicated in bf16": (["skipped block"], 2, {"communication_data_type": "bf16"}, 4e-3),
}


def train_variants(world: World, variants: list[str]) -> list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """For each variant and its models: the weights, and those of stage 0 in the same precision."""
    found = []
    for variant in variants:
        names, stage, config, _ = VARIANTS[variant]
        kept = {key: value for key, value in config.items() if key in ("bf16", "fp16", "torch_autocast")}
        if variant == "sums in fp32":
            kept["data_types"] = config["data_types"]
        for name in names:
            both = [
                train(world, name, *at, {**more, "optimizer": SGD}) for *at, more in ((stage, 2, config), (0, 2, kept))
            ]
            found.append((variant, both[0], both[1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["some", pytest.param("all", marks=pytest.mark.full)])
def test_every_precision_and_place_of_the_state(kind: str) -> None:
    some = ["bf16, stage 1", "fp16, stage 3", "autocast, stage 2", "recomputed", "offloaded in bf16"]
    for rank in run_ranks(train_variants, 2, some if kind == "some" else list(VARIANTS)):
        for variant, found, expected in rank:
            compare(found, expected, VARIANTS[variant][3])


@pytest.mark.full
@pytest.mark.parametrize("name", ["experts", "routed blocks"])
def test_groups_of_mics(name: str) -> None:
    expected = train_by_hand(name, 4, 2)
    for found in run_ranks(train, 4, name, 3, 2, {"zero_optimization": {"mics_shard_size": 2}}):
        compare(found, expected)


def train_in_other_ways(world: World, name: str, stage: int) -> list[dict[str, Tensor]]:
    """Without reducing until the boundary; with two losses in each micro step; with the program's own backward."""
    sharding.SMALL_BLOCK = 1
    found = []
    for way in ("no_sync", "two losses", "own backward"):
        engine = make_engine(name, stage, 2)
        for step in range(STEPS):
            for micro in range(2):
                batch = make_batch(name, step, micro, world.data_rank)
                if way == "no_sync":
                    with engine.no_sync():
                        engine.backward(engine(*batch))
                elif way == "two losses":
                    engine.backward(engine(*batch) / 2)
                    engine.backward(engine(*batch) / 2)
                else:
                    engine(*batch).backward()
                engine.step()
        found.append(engine.module_state_dict())
    return found


@pytest.mark.full("experts-1", "experts-2", "skipped block-1")
@pytest.mark.parametrize(
    ("name", "stage"), [("experts", 1), ("experts", 2), ("experts", 3), ("skipped block", 1), ("repeated block", 2)]
)
def test_gradients_that_a_program_reduces_in_other_ways(name: str, stage: int) -> None:
    expected = train_by_hand(name, 2, 2)
    for ways in run_ranks(train_in_other_ways, 2, name, stage):
        for found in ways:
            compare(found, expected)


def save_and_resume(world: World, folder: str, name: str, stage: int) -> list[dict[str, Tensor]]:
    """The weights after training without a break, and after a save, by an engine that resumes."""
    sharding.SMALL_BLOCK = 1
    found = []
    for part in (range(STEPS), range(3), range(3, STEPS)):
        engine = make_engine(name, stage, 1)
        if part.start:
            engine.load_checkpoint(folder)
        for step in part:
            engine.backward(engine(*make_batch(name, step, 0, world.data_rank)))
            engine.step()
        if part.stop == 3:
            engine.save_checkpoint(folder)
        found.append(engine.module_state_dict())
    return [found[0], found[2]]


@pytest.mark.full("own experts-0", "heads-3")
@pytest.mark.parametrize(("name", "stage"), [("own experts", 0), ("own experts", 2), ("heads", 3), ("branches", 1)])
def test_a_run_resumes_whatever_its_ranks_have_used(name: str, stage: int, tmp_path: Path) -> None:
    for unbroken, resumed in run_ranks(save_and_resume, 2, str(tmp_path), name, stage):
        compare(resumed, unbroken, 0.0)


class DividedExperts(Routed):
    tp_plan: ClassVar = {"experts.*.up": "colwise", "experts.*.down": "rowwise"}


def train_divided(world: World, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": ADAMW}
    config |= {"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "tensor_parallel": {"size": 2}}
    engine = dsjob.initialize(model=DividedExperts(Mlp), config=config)[0]
    for step in range(STEPS):
        for micro in range(2):
            engine.backward(engine(*make_batch("large experts", step, micro, engine.world.data_rank)))
            engine.step()
    return engine.module_state_dict()


@pytest.mark.full("0", "1")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_that_tensor_ranks_divide(stage: int) -> None:
    expected = train_by_hand("large experts", 2, 2)
    for found in run_ranks(train_divided, 4, stage):
        compare(found, expected)


class RoutedStage(pipelines.Block):
    """A block of a pipeline with two experts. The tokens of a micro batch choose one."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.experts = nn.ModuleList([nn.Linear(pipelines.WIDTH, pipelines.WIDTH) for _ in range(2)])

    def forward(self, values: pipelines.Values) -> pipelines.Values:
        hidden, mask, number = super().forward(values)
        return hidden + self.experts[int(mask.sum()) % 2](hidden), mask, number


def train_pipeline(world: World, stages: int, stage: int) -> Any:
    layers = [
        TiedLayerSpec("embed", pipelines.Embed),
        *(LayerSpec(RoutedStage, number) for number in range(3)),
        TiedLayerSpec("embed", pipelines.Embed, forward_fn=pipelines.read_out),
    ]
    micro = 8 // (world.everyone.size // stages)
    return pipelines.train(pipelines.make_engine(world, stages, micro=micro, stage=stage, layers=layers), 4)


@pytest.mark.full("0", "1")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_in_the_stages_of_a_pipeline(stage: int) -> None:
    (alone,) = run_ranks(train_pipeline, 1, 1, 0)
    for found in run_ranks(train_pipeline, 4, 2, stage):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        compare(found["weights"], {key: alone["weights"][key] for key in found["weights"]}, 1e-5)


def train_switch(world: World, stage: int) -> tuple[dict[str, Tensor], set[int]]:
    """The weights of a model of transformers whose experts are separate modules, and how many experts had no gradient
    on this rank."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "expert_capacity": 8, "num_heads": 2, "vocab_size": 40}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    model = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(**sizes, **layers, num_experts=6, dropout_rate=0.0, decoder_start_token_id=0)
    )
    called = set[int]()
    for number, module in enumerate(model.modules()):
        if type(module).__name__ == "SwitchTransformersDenseActDense":
            module.register_forward_hook(lambda *_, number=number: called.add(number))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    engine = dsjob.initialize(model=model, config=config)[0]
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + world.data_rank)
        tokens = torch.randint(1, 40, (1, 3), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine.module_state_dict(), called


@pytest.mark.full("1", "2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_of_transformers(stage: int) -> None:
    (expected, first), (_, second) = run_ranks(train_switch, 2, 0)
    assert first != second  # the ranks have called different experts
    for found, _ in run_ranks(train_switch, 2, stage):
        compare(found, expected, 1e-5)


def add_up(world: World) -> list[float | None]:
    """The sums of gradients that both ranks have, the first, the second, and none."""
    masters = {name: nn.Parameter(torch.zeros(2)) for name in ("both", "first", "second", "none", "other")}
    for name in ("both", ("first", "second")[world.data_rank], "other"):
        masters[name].grad = torch.full((2,), 1.0 + world.data_rank)
    add_partial(masters, [({"both", "first", "second", "none"}, world.data)], world.device)
    return [None if master.grad is None else float(master.grad[0]) for master in masters.values()]


def test_sums_over_ranks_that_hold_one_model_together() -> None:
    first, second = run_ranks(add_up, 2)
    assert first == [3.0, 1.0, 2.0, None, 1.0]
    assert second == [3.0, 1.0, 2.0, None, 2.0]


def use_other_blocks(world: World) -> str:
    engine = make_engine("large experts", 3, 1)
    for step in range(STEPS):
        x, route = make_batch("large experts", step, 0, world.data_rank)
        try:
            engine.backward(engine(x.to(engine.device), world.data_rank if step == 2 else route % 1))
            engine.step()
            if step == STEPS - 1:
                engine.module_state_dict()
        except UsageError as error:
            return f"step {step}: {error}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")
def test_on_gpus_blocks_that_ranks_mixed_up_are_noticed() -> None:
    """NCCL pairs the gathers of equally large blocks: both ranks then compute with halves of both."""
    for found in run_ranks(use_other_blocks, 2, library=build_device()):
        assert re.match("step [23]: ranks used different parts of the model at ZeRO stage 3", found)
        assert "rank 0 used experts.0, rank 1 used experts.1" in found
