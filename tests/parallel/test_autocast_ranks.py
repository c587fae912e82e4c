"""torch_autocast on real ranks: stages against each other, and which gradients travel low."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import build_net, make_deepspeed_engine, make_engine, make_tokens, train_engine, whole_state
from ranks import run_ranks
from test_stages import TiedNet
from torch import nn

from dsjob.deepspeed.runtime.torch_autocast import get_comm_dtype, has_autocast_dtype, has_comm_dtype
from dsjob.parallel.strategy import local
from dsjob.ranks.mesh import World

Curves = list[tuple[list[float], float]]


def train_stages(world: World, dtype: str, accumulation: int, kind: str) -> dict[int, dict[str, Any]]:
    """Of fp32 (-1) and of autocast at each stage."""
    found = {}
    for stage in (-1, 0, 1, 2, 3):
        net: nn.Module = TiedNet() if kind == "tied and frozen" else build_net()
        autocast = {"enabled": stage >= 0, "dtype": dtype}
        fp16 = {"initial_scale_power": 10}
        engine = make_engine(max(stage, 0), net=net, accumulation=accumulation, torch_autocast=autocast, fp16=fp16)
        found[stage] = {
            "losses": train_engine(engine, 0, 5),
            "norm": engine.get_global_grad_norm(),
            "scale": engine.loss_scale(),
            "skipped": engine.skipped_steps,
            "dtypes": {t.dtype for t in whole_state(engine).values()},
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "accumulation", "kind"),
    [
        ("bfloat16", 1, "tied and frozen"),
        ("float16", 3, "plain"),
        ("bfloat16", 1, "plain"),
        ("bfloat16", 3, "plain"),
        ("bfloat16", 3, "tied and frozen"),
        ("float16", 3, "tied and frozen"),
    ],
)
@pytest.mark.full
def test_stages_agree_with_each_other_and_with_fp32(dtype: str, accumulation: int, kind: str) -> None:
    close = 4e-3 if dtype == "bfloat16" else 5e-4
    for found in run_ranks(train_stages, 2, dtype, accumulation, kind):
        exact = found.pop(-1)
        for result in found.values():
            assert result["losses"] == pytest.approx(exact["losses"], abs=close, rel=close / 2)
            assert result["losses"] == pytest.approx(found[0]["losses"], abs=close, rel=close / 2)
            assert result["losses"] != exact["losses"]
            assert result["norm"] == pytest.approx(exact["norm"], rel=10 * close)
            assert (result["scale"], result["skipped"]) == (1024.0 if dtype == "float16" else 1.0, 0)
            assert result["dtypes"] == {torch.float32}


def find_rounded(world: World, classes: list[str] | None) -> list[set[str]]:
    """For each stage: the parameters whose reduced gradients have no more digits than bf16."""
    found = []
    for stage in range(4):
        safe = {} if classes is None else {"lower_precision_safe_modules": classes}
        engine = make_engine(stage, torch_autocast={"enabled": True, "dtype": "bf16", **safe})
        x, y = make_tokens(world.data_rank, 4)
        engine.backward(engine(x, y))
        engine.strategy.reduce_gradients()
        engine.strategy.finish_gradients()
        shares = {n: local(m.grad) for n, m in engine.strategy.masters.items() if m.grad is not None}
        found.append({n for n, share in shares.items() if torch.equal(share, share.bfloat16().float())})
    return found


@pytest.mark.slow
def test_the_gradients_of_safe_modules_alone_travel_low() -> None:
    names = [name for name, _ in build_net().named_parameters()]
    linear = {n for n in names if n.split(".")[-2] in ("fc", "proj", "head")}
    norms = {n for n in names if n.split(".")[-2] in ("ln", "ln_f")}
    for classes, low in ((None, linear), (["torch.nn.LayerNorm"], norms), ([], set())):
        for found in run_ranks(find_rounded, 2, classes):
            for rounded in found:
                assert rounded == low


def find_marked(world: World) -> list[tuple[str, set[str]]]:
    """Which parameters the functions of DeepSpeed's names find; parameters are shown gathered after an evaluation, and
    always by DeepSpeed's engine at stages 1 and 2."""
    rows = []
    for stage in range(4):
        for make in (make_engine, make_deepspeed_engine):
            engine = make(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
            for when in ("built", "evaluated"):
                named = dict(engine.module.named_parameters())
                marked = {name for name, p in named.items() if has_autocast_dtype(p)}
                assert marked == {name for name, p in named.items() if has_comm_dtype(p)}
                assert marked == {name for name, p in named.items() if get_comm_dtype(p) == torch.bfloat16}
                rows.append((f"stage {stage}, {make.__name__}, {when}", marked))
                with torch.no_grad():
                    engine(*make_tokens(0, 2))
    return rows


def test_marks_are_found_whatever_tensor_the_model_shows() -> None:
    expected = {name for name, _ in build_net().named_parameters() if name.split(".")[-2] in ("fc", "proj", "head")}
    for rows in run_ranks(find_marked, 2):
        assert [name for name, marked in rows if marked != expected] == []
