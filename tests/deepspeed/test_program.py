"""A program for DeepSpeed runs by changing its import, and finds what it calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from engines import make_deepspeed_engine
from programs import run_program
from ranks import run_ranks
from torch import nn

import dsjob.checkpointing
import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dsjob.deepspeed.runtime.lr_schedules import CYCLE_MIN_LR, WarmupDecayLR, WarmupLR
from dsjob.deepspeed.runtime.zero import ZeroParamStatus
from dsjob.deepspeed.utils import RepeatingLoader
from dsjob.errors import DataError, UsageError
from dsjob.ranks.mesh import World

# In the manner of DeepSpeed's getting-started guide: arguments, a config file, a loader, the three calls, a checkpoint.
PROGRAM = """
import argparse, torch
import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.accelerator import get_accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
data = [(x, x.sum(dim=-1, keepdim=True)) for x in torch.randn(32, 4)]
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args, model=net, model_parameters=net.parameters(), training_data=data
)
first = last = None
for epoch in range(10):
    for step, (x, y) in enumerate(loader):
        x, y = x.to(engine.local_rank if torch.cuda.is_available() else "cpu"), y.to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        last = loss.item()
        first = last if first is None else first
engine.save_checkpoint("out", client_state={"epoch": epoch})
_, client = engine.load_checkpoint("out")
with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
    if deepspeed.comm.get_rank() == 0:
        engine.module[0].bias.data.zero_()
bias = deepspeed.utils.safe_get_full_fp32_param(engine.module[0].bias)
if deepspeed.comm.get_rank() == 0:
    print(first > 2 * last, client["epoch"], float(bias.abs().sum()), engine.global_steps)
    print(get_accelerator().device_name(), flush=True)
import os
os._exit(0)  # torch's threads may abort an interpreter that ends: see dsjob.launch.rank.end_rank
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_runs_unchanged_but_for_its_import(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, "program.py", "--deepspeed", "--deepspeed_config", "ds.json"]
    result = run_program(command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == ["True", "9", "0.0", "40", deepspeed.get_accelerator().device_name()]


def test_optimizers_have_deepspeeds_defaults() -> None:
    weight = nn.Parameter(torch.ones(2))
    adam = FusedAdam([weight])
    group = adam.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["decoupled_weight_decay"]) == (1e-3, 0.0, True)
    assert DeepSpeedCPUAdam([weight], adamw_mode=False).param_groups[0]["decoupled_weight_decay"] is False
    lamb = deepspeed.ops.lamb.FusedLamb([weight], lr=0.5)
    assert (lamb.param_groups[0]["lr"], lamb.param_groups[0]["max_coeff"]) == (0.5, 10.0)
    assert deepspeed.ops.lion.FusedLion([weight]).param_groups[0]["lr"] == 1e-3


def test_schedules_are_of_their_classes_whoever_makes_them() -> None:
    optimizer = FusedAdam([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = WarmupLR(optimizer, 0.0, 0.1, 10)
    assert isinstance(schedule, WarmupLR)
    assert not isinstance(schedule, WarmupDecayLR)
    assert CYCLE_MIN_LR == "cycle_min_lr"
    for wrong in ({"warmup_num_steps": -5}, {"warmup_num_stesp": 5}, {"warmup_num_steps": None}):
        with pytest.raises(ValueError, match="warmup_num_st"):
            WarmupLR(optimizer, **wrong)
    config = {"train_batch_size": 2, "scheduler": {"type": "WarmupLR", "params": {}}}
    made = deepspeed.initialize(model=nn.Linear(2, 2), optimizer=optimizer.__class__, config=config)[3]
    assert isinstance(made, WarmupLR)


def test_on_one_rank_parameters_have_the_attributes_of_shards() -> None:
    status = ZeroParamStatus
    with deepspeed.zero.Init(), deepspeed.zero.Init():
        assert deepspeed.comm.is_initialized()
        net = nn.Sequential(nn.Linear(2, 3))
    plain = nn.Linear(2, 2)
    weight = net[0].weight
    assert (weight.ds_shape, weight.ds_numel, weight.ds_status) == ((3, 2), 6, status.NOT_AVAILABLE)
    assert not hasattr(plain.weight, "ds_id")
    with deepspeed.zero.GatheredParameters(net.parameters(), modifier_rank=0):
        with deepspeed.zero.GatheredParameters([weight, plain.weight]):
            assert weight.ds_status == status.AVAILABLE
        assert weight.ds_status == status.AVAILABLE
        weight.data.fill_(2)
    assert weight.ds_status == status.NOT_AVAILABLE
    net[0].bias.requires_grad_(False)
    engine = deepspeed.initialize(model=net, config={"train_batch_size": 1, "optimizer": {"type": "Adam"}})[0]
    assert deepspeed.utils.safe_get_full_fp32_param(net[0].bias) is None  # frozen
    assert deepspeed.utils.safe_get_full_fp32_param(weight) is not None
    assert float(engine(torch.ones(2)).sum() - net[0].bias.sum()) == pytest.approx(12)


def test_a_repeating_loader_begins_again() -> None:
    loader = iter(RepeatingLoader([1, 2, 3]))
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    with pytest.raises(DataError, match="yields no batches"):
        next(RepeatingLoader([]))


def test_what_dsjob_lacks_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("dsjob.deepspeed.moe.layer")
    assert deepspeed.checkpointing.checkpoint is dsjob.checkpointing.checkpoint
    assert deepspeed.comm.ReduceOp.SUM is torch.distributed.ReduceOp.SUM
    assert deepspeed.comm.is_initialized() in (True, False)
    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine


def test_groups_without_experts_are_what_they_were() -> None:
    weight = nn.Parameter(torch.ones(2))
    group = {"params": iter([weight]), "name": "parameters", "lr": 0.5}
    split = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer
    assert split(group) == [{"params": [weight], "name": "parameters", "lr": 0.5}]
    weight.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="experts"):
        split([{"params": [weight]}])


def _load_into_engine(world: World, folder: str) -> list[list[float]]:
    from dsjob.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    def read() -> list[float]:
        whole = deepspeed.utils.safe_get_full_fp32_param(engine.module.bias)
        assert whole is not None
        return whole.tolist()

    engine = make_deepspeed_engine(2, net=nn.Linear(3, 3))
    engine.save_checkpoint(folder)
    values = [read()]
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    values.append(read())
    shown = engine.module.bias.detach()
    load_state_dict_from_zero_checkpoint(engine.module, folder)
    assert shown.tolist() == read()
    return [*values, read()]


def test_weights_of_a_checkpoint_are_loaded_into_a_sharded_model(tmp_path: Path) -> None:
    for saved, changed, loaded in run_ranks(_load_into_engine, 2, str(tmp_path)):
        assert loaded == saved != changed


def test_weights_of_a_checkpoint_are_read_whole(tmp_path: Path) -> None:
    from dsjob.deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "bf16": {"enabled": True}}
    engine = deepspeed.initialize(model=net, config=config)[0]
    engine.save_checkpoint(str(tmp_path))
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert weights["1.weight"] is weights["0.weight"]
    assert weights["0.weight"].dtype == torch.float32
    fresh = load_state_dict_from_zero_checkpoint(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), str(tmp_path))
    assert torch.equal(fresh[1].weight, weights["0.weight"])  # type: ignore[index]
    trained = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    assert trained.keys() == weights.keys() - {"1.bias"}
    out = tmp_path / "out"
    for _ in range(2):  # DeepSpeed replaces what is there
        convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(out), exclude_frozen_parameters=True)
    read = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert read.keys() == trained.keys()
    assert read["1.weight"] is read["0.weight"]
    assert torch.equal(read["1.weight"], weights["0.weight"])
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(out), safe_serialization=True)
    assert list(out.glob("*.safetensors"))
