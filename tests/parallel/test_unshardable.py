"""Parameters without dimensions (CLIP's logit_scale) and empty ones, at the stages that shard all others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_deepspeed_engine, whole_state
from ranks import run_ranks
from safetensors.torch import load_file
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle
from torch import Tensor, nn

from dsjob.checkpoint.offline.convert import convert
from dsjob.deepspeed import DeepSpeedEngine
from dsjob.parallel import parameters, zero
from dsjob.parallel.zero_init import Init
from dsjob.ranks.mesh import World

NAMES = ("logit_scale", "prompt", "blocks.0.gate", "offset")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.fc(x).tanh()


class Clip(nn.Module):
    """Pairs of rows against one another. `offset` is frozen; `sometimes` is used by some ranks, `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt = nn.Parameter(torch.empty(0, 4))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.image, self.text = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.sometimes, self.never = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(7.0))
        self.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.cat([self.prompt, x])
        for block in self.blocks:
            x = block(x)
        products = self.image(x) @ self.text(x).T
        logits = self.logit_scale.exp() * products + self.offset
        assert logits.dtype == products.dtype
        if extra:
            logits = logits * self.sometimes
        return nn.functional.cross_entropy(logits.float(), torch.arange(len(x), device=x.device))


def train(engine: DeepSpeedEngine, first: int, steps: int) -> list[float]:
    """The losses of this rank's micro steps, and the norms of the steps."""
    found = []
    for step in range(first, first + steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + engine.world.data_rank)
            x = torch.randn(2, 4, generator=generator)
            loss = engine(x.to(engine.device), extra=engine.world.data_rank == 0)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        found.append(float(engine.get_global_grad_norm()))
    return found


def make(
    stage: int,
    precision: str = "fp32",
    options: dict[str, Any] | None = None,
    net: nn.Module | None = None,
    **config: Any,
) -> DeepSpeedEngine:
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bf16"}
    return make_deepspeed_engine(
        stage,
        net=net or Clip(),
        accumulation=2,
        bf16=precision == "bf16",
        gradient_clipping=0.5,
        **{"zero_optimization": {"stage": stage, **(options or {})}, **config},
    )


def train_stages(world: World, precision: str, config: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    found = []
    for stage in range(4):
        engine = make(stage, precision, options if stage == 3 else {}, **config)
        found.append((train(engine, 0, 2), whole_state(engine)))
    return found


ADAMW = {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer", "options"),
    [
        ("fp32", {"type": "AdamW", "params": ADAMW}, {}),
        ("bf16", {"type": "AdamW", "params": {**ADAMW, "fused": True}}, {}),
        ("fp32", {"type": "Lamb", "params": {"lr": 0.01}}, {"offload_optimizer": {"device": "cpu"}}),
        *(
            pytest.param(precision, {"type": kind, "params": {"lr": 0.01, **params}}, options, marks=pytest.mark.full)
            for precision, kind, params, options in (
                ("bf16", "Muon", {}, {"mics_shard_size": 1}),
                ("fp16", "RMSprop", {"foreach": True}, {}),
                ("fp32", "SGD", {"momentum": 0.9}, {"offload_param": {"device": "cpu"}}),
                ("bf16", "Lion", {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
                ("autocast", "AdamW", {"weight_decay": 0.1}, {"zero_hpz_partition_size": 1}),
            )
        ),
    ],
    ids=str,
)
def test_they_train_as_at_stage_0(precision: str, optimizer: dict[str, Any], options: dict[str, Any]) -> None:
    results = run_ranks(train_stages, 2, precision, {"optimizer": optimizer}, options)
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    for (expected, weights), *sharded in results:
        assert weights["model.logit_scale"] != 1
        assert weights["model.never"] == 7
        for stage, (found, state) in enumerate(sharded, 1):
            assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
            assert set(state) == set(weights)
            for name, tensor in weights.items():
                torch.testing.assert_close(
                    state[name].float(), tensor.float(), rtol=tolerance, atol=tolerance, msg=f"stage {stage}: {name}"
                )
    for (_, first), (_, second) in zip(*results, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def train_on_device(world: World) -> list[Any]:
    device = find_device()
    found = []
    for options in (
        {},
        {"offload_param": {"device": "cpu", "pin_memory": True}},
        {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    ):
        found.append(train(make(3, "bf16", options), 0, 2))
    return [found, device.take_hazards() if device is not None else []]


@pytest.mark.slow
@pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")
@pytest.mark.full
def test_on_a_device_they_train_as_on_the_host() -> None:
    for (expected, _), (found, hazards) in zip(
        run_ranks(train_on_device, 2), run_ranks(train_on_device, 2, library=build()), strict=True
    ):
        assert not hazards
        for theirs, ours in zip(expected, found, strict=True):
            assert ours == pytest.approx(theirs, abs=3e-2)


def save(world: World, folder: str, stage: int, precision: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = make(stage, precision)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    return whole_state(engine), train(engine, 2, 1)


def load(world: World, folder: str, stage: int, precision: str, again: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = make(stage, precision)
    assert engine.load_checkpoint(folder)[0] is not None
    engine.save_checkpoint(again)
    return whole_state(engine), train(engine, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "precision"),
    [
        ((2, 3), (1, 0), "fp32"),
        ((2, 3), (3, 1), "bf16"),
        pytest.param((1, 0), (2, 3), "fp32", marks=pytest.mark.full),
        pytest.param((2, 2), (2, 2), "fp32", marks=pytest.mark.full),
    ],
)
@pytest.mark.full("saved1-loaded1-bf16")
def test_checkpoints_keep_them_to_the_bit(
    saved: tuple[int, int], loaded: tuple[int, int], precision: str, tmp_path: Path
) -> None:
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    before = run_ranks(save, saved[0], first, saved[1], precision)
    after = run_ranks(load, loaded[0], first, loaded[1], precision, again)
    expected = before[0][0]
    assert {f"model.{name}" for name in NAMES} < set(expected)
    for state, _ in after:
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
            assert state[name].shape == tensor.shape
    if saved == loaded:
        assert [losses for _, losses in after] == [losses for _, losses in before]
    for number, folder in enumerate((first, again)):
        place = str(tmp_path / f"{number}.safetensors")
        convert(folder, place, to="fp32")
        weights = load_file(place)
        for name, tensor in expected.items():
            if name.startswith("model."):
                torch.testing.assert_close(weights[name.removeprefix("model.")], tensor, rtol=0, atol=0, msg=name)


def read_gradients(world: World, stage: int) -> list[Any]:
    """Of logit_scale: before the boundary, after it, and what a loss of the program's own leaves; then its weights."""
    engine = make(stage)
    scale, found = engine.module.logit_scale, []
    x = torch.eye(2, 4) * (1 + world.data_rank)
    for _ in range(2):
        engine.backward(engine(x, extra=False))
        found.append(parameters.safe_get_full_grad(scale))
        engine.step()
    engine.module.zero_grad()
    parameters.safe_set_full_fp32_param(scale, torch.tensor(2.0))
    found += [parameters.safe_get_full_fp32_param(scale), engine.module.logit_scale.detach().clone()]
    found.append(parameters.safe_get_full_optimizer_state(scale, "exp_avg"))
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=1):
        scale.data.fill_(3.0 + world.data_rank)
    found += [parameters.safe_get_full_fp32_param(scale), engine.module.state_dict()["logit_scale"].clone()]
    for _ in range(2):
        (engine(x, extra=False) / 2).backward()
        engine.step()
    engine.empty_partition_cache()
    found.append(parameters.safe_get_full_fp32_param(scale))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_programs_read_and_write_them_as_at_stage_0(stage: int) -> None:
    expected, found = run_ranks(read_gradients, 2, 0), run_ranks(read_gradients, 2, stage)
    for ours, theirs in zip(found, expected, strict=True):
        assert [t.dim() for t in ours] == [0] * len(ours)
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-7)
        assert ours[-2] == 4
    assert found[0][0] != found[1][0]  # each rank's own, until the boundary
    assert found[0][1] == found[1][1]


def train_built(world: World) -> list[Any]:
    """The losses of a model that was sharded as it was made, and of one that was not."""
    found = []
    for sharded in (False, True):
        with Init(enabled=sharded):
            net = Clip()
        engine = make(3, net=net, options={"zero_hpz_partition_size": 1})
        found.append(train(engine, 0, 2))
    return found


@pytest.mark.slow
def test_a_model_that_is_sharded_while_it_is_built() -> None:
    for whole, sharded in run_ranks(train_built, 2):
        assert sharded == whole
