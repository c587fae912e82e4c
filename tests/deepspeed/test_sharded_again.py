"""A model that stage 3 has sharded: a second `initialize` trains it on, and peft merges its adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import run_program

PROGRAM = """
import os, sys, torch
from peft import LoraConfig, get_peft_model
import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.utils import safe_get_full_fp32_param as whole

deepspeed.init_distributed()
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}
base = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
start = base[0].weight.detach().clone()
net = get_peft_model(base, LoraConfig(target_modules=["0"], r=2, lora_alpha=4))
trained = [p for p in net.parameters() if p.requires_grad]
engine = deepspeed.initialize(model=net, model_parameters=trained, config=config)[0]
for _ in range(2):
    engine.backward(engine(torch.randn(2, 8)).square().sum())
    engine.step()
engine = deepspeed.initialize(model=net, model_parameters=trained, config=config)[0]
engine.backward(engine(torch.randn(2, 8)).square().sum())
engine.step()
a, b = (whole(getattr(base[0], name)["default"].weight) for name in ("lora_A", "lora_B"))
merged = net.merge_and_unload()
with deepspeed.zero.GatheredParameters(list(merged.parameters())):
    found = merged[0].weight.detach().clone()
if deepspeed.comm.get_rank() == 0:
    print("steps:", engine.global_steps)
    print("moved:", bool((b @ a).abs().max() > 0.01), "merged:", torch.allclose(found, start + 2 * b @ a, atol=1e-6))
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)  # see dsjob.launch.rank.end_rank
"""


@pytest.mark.slow
def test_a_sharded_model_gets_a_second_engine_and_adapters_merge(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "program.py").write_text(PROGRAM)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = run_program([*start, "program.py"], cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "steps: 1" in result.stdout
    assert "moved: True merged: True" in result.stdout
