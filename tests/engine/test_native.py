"""Which jobs step with native kernels: all ranks of a model alike, where it pays or the document requires it."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, train_engine, whole_state
from machine import lacks_commands
from ranks import run_ranks
from torch import nn

from dsjob.deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from dsjob.engine import native
from dsjob.engine.native import choose_layers
from dsjob.errors import BuildError
from dsjob.ops import cpu_optimizers, fused, loading, onebit
from dsjob.optim import host
from dsjob.ranks.mesh import World

LACKING = lacks_commands(os.environ.get("CXX", "c++"))
ALONE = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))
needs_compiler = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


def train(stage: int, wish: str, **config: Any) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    engine = make_engine(stage, ops={"cpu_optimizers": wish}, **config)
    assert engine.optimizer is not None
    return train_engine(engine, 0, 4), whole_state(engine), host.prefers_kernels(engine.optimizer)


def compare(world: World, stage: int) -> list[str]:
    """What differs between steps with and without kernels."""
    assert cpu_optimizers.find_problem() == ""
    offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}} if stage else {"stage": 0}
    found = []
    # Limits below the norm of the gradients: the kernels clip.
    for precision in ({"gradient_clipping": 0.05}, {"bf16": True, "gradient_clipping": 0.05}):
        expected, state, plain = train(stage, "off", zero_optimization=offload, **precision)
        losses, native_state, kernels = train(stage, "require", zero_optimization=offload, **precision)
        if plain or not kernels:
            found.append(f"{precision}: kernels were used: {plain}, {kernels}")
        if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-6 if len(precision) == 1 else 1e-3):
            found.append(f"{precision}: {losses} instead of {expected}")
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if len(precision) == 1 else {"rtol": 1e-2, "atol": 1e-3}
        found += [n for n, t in state.items() if not torch.allclose(native_state[n].float(), t.float(), **tolerance)]
    return found


@needs_compiler
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.full("1", "2")
def test_a_run_with_kernels_is_one_without(stage: int) -> None:
    assert run_ranks(compare, 2, stage) == [[], []]


@needs_compiler
@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "initial_scale_power": 8}}, {"bf16": True}])
@pytest.mark.parametrize("guards", [False, True])
def test_kernels_unscale_divide_and_clip(precision: dict[str, Any], guards: bool) -> None:
    """As they read gradients, which are not changed before. With a guard, the norm is measured twice."""
    # With so large an eps, a step is in proportion to the gradient.
    sections = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1.0}}, "gradient_clipping": 0.05}
    norms: dict[str, list[float]] = {"off": [], "require": []}
    states = []
    for wish, found in norms.items():
        engine = make_engine(0, ops={"cpu_optimizers": wish}, **sections, **precision)
        if guards:
            engine.strategy.guard = lambda names: None
        for step in range(3):
            engine.divide_gradients(torch.tensor(3.0))
            train_engine(engine, step, 1)
            found.append(engine.get_global_grad_norm())
        states.append(whole_state(engine))
        for name, parameter in engine.module.named_parameters():  # the kernels have written these, too
            assert torch.equal(parameter, engine.strategy.masters[name].to(parameter.dtype)), name
    assert min(norms["off"]) > 0.05
    assert norms["require"] == pytest.approx(norms["off"], rel=1e-5 if not precision else 1e-2)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6 if not precision else 1e-3)


PROBLEM = "the C++ compiler failed:\n  a.cpp:1:1: error: first\n  a.cpp:2:1: error: second"


def lack_on_one_rank(world: World, wish: str) -> tuple[bool, str, list[str]]:
    if world.everyone.rank == 1:
        cpu_optimizers.find_problem = lambda: PROBLEM
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        native.WORTHWHILE = 1
        try:
            used, error = train(0, wish)[2], ""
        except BuildError as raised:
            used, error = False, str(raised)
    return used, error, [str(item.message) for item in caught if "C++" in str(item.message)]


@needs_compiler
def test_replicas_use_the_kernels_only_if_all_have_them() -> None:
    """Else their weights would drift apart by rounding."""
    told = "torch's operators step the optimizer on the host: the C++ compiler failed: a.cpp:1:1: error: first"
    assert run_ranks(lack_on_one_rank, 2, "auto") == [(False, "", [told]), (False, "", [])]
    hint = "with ops.cpu_optimizers=auto, dsjob uses torch's operators instead"
    assert run_ranks(lack_on_one_rank, 2, "require") == [(False, f"{PROBLEM}\n  {hint}", [])] * 2


def test_small_models_build_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSJOB_OPS_DIR", str(tmp_path / "ops"))
    loading.load.cache_clear()
    train(0, "auto")
    assert not (tmp_path / "ops").exists()
    loading.load.cache_clear()


def test_requiring_kernels_for_another_optimizer_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"ops\.cpu_optimizers: there is no kernel for SGD"):
        train(0, "require", optimizer={"type": "SGD", "params": {"lr": 0.1}})


COMPRESSING = {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}}


def compress(world: World, wish: str, lacks: bool = False) -> tuple[bool, dict[str, torch.Tensor], str, list[str]]:
    """Whether the op compressed, the weights after four steps, an error, and warnings about compilers."""
    native.WORTHWHILE = 1
    if lacks and world.everyone.rank == 1:
        onebit.find_problem = lambda device, build: "no C++ compiler was found"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine = make_engine(0, optimizer=COMPRESSING, ops={"onebit": wish})
        except BuildError as raised:
            return False, {}, str(raised), []
    train_engine(engine, 0, 4)
    told = [str(item.message) for item in caught if "C++" in str(item.message)]
    return engine.optimizer.native, whole_state(engine), "", told  # type: ignore[union-attr]


@needs_compiler
def test_a_compiled_compression_changes_no_bit() -> None:
    plain, compiled = (run_ranks(compress, 2, wish) for wish in ("off", "auto"))
    assert [found[0] for found in (*plain, *compiled)] == [False, False, True, True]
    for name, weight in plain[0][1].items():
        assert torch.equal(compiled[0][1][name], weight), name


def test_a_rank_without_the_compiled_compression_is_told_of_once() -> None:
    told = "torch's operators compress momenta: no C++ compiler was found"
    found = run_ranks(compress, 2, "auto", True)
    assert [(used, warned) for used, _, _, warned in found] == [(False, [told]), (False, [])]
    hint = "with ops.onebit=auto, dsjob uses torch's operators instead"
    for _, _, error, _ in run_ranks(compress, 2, "require", True):
        assert error == f"no C++ compiler was found\n  {hint}"


def test_requiring_compression_for_another_optimizer_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"ops\.onebit: AdamW compresses nothing"):
        make_engine(0, optimizer={"type": "AdamW", "params": {"lr": 0.1}}, ops={"onebit": "require"})


def test_layers_use_fused_kernels_as_the_document_wishes() -> None:
    options = {"hidden_size": 8, "heads": 2, "num_hidden_layers": 1, "initializer_range": 0.1}
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options))
    model = nn.Sequential(layer)
    for found in (False, True):
        layer.native = found
        choose_layers(model, "auto", ALONE)
        assert layer.native is found
    choose_layers(model, "off", ALONE)
    assert layer.native is False
    with pytest.raises(BuildError, match=r"ops\.transformer: its kernels need GPUs"):
        choose_layers(model, "require", ALONE)
    with pytest.raises(BuildError, match=r"ops\.transformer: the model has no DeepSpeedTransformerLayer"):
        choose_layers(nn.Linear(2, 2), "require", ALONE)
    with pytest.raises(BuildError, match=r"ops\.transformer: the model has no"):
        make_engine(0, ops={"transformer": "require"})


def test_required_kernels_are_used_on_gpus_or_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"hidden_size": 8, "heads": 2, "num_hidden_layers": 1, "initializer_range": 0.1}
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options))
    world = dataclasses.replace(ALONE, device=torch.device("cuda"))
    told = ["this torch was built without CUDA", ""]
    monkeypatch.setattr(fused, "find_problem", lambda build: told.pop(0) if build else "not asked to build")
    with pytest.raises(BuildError, match="this torch was built without CUDA") as raised:
        choose_layers(layer, "require", world)
    assert raised.value.hint == "with ops.transformer=auto, dsjob uses torch's operators instead"
    choose_layers(layer, "require", world)
    assert layer.native is True


def test_kernels_for_gpus_are_built_only_if_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSJOB_OPS_DIR", str(tmp_path))
    loading.load.cache_clear()
    told = onebit.find_problem(torch.device("cuda"), build=False)
    assert told == "onebit_cuda has not been built: run `dsjob ops build onebit_cuda`"
    assert not any(tmp_path.iterdir())
    loading.load.cache_clear()
