"""Makes the DeepSpeed checkpoints of tests/data/deepspeed_runs with the real library, on CPU.

    pip install deepspeed==0.19.6 && python tests/support/make_deepspeed_runs.py tests/data/deepspeed_runs

Each case trains a small network for three steps, saves, notes digests of all that was saved as DeepSpeed itself gathers
it, and goes on for four steps, whose mean losses over all ranks a continuation elsewhere has to follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_net import ROWS, SmallNet, make_rows
from torch import Tensor, multiprocessing, nn

SAVED, MORE = 3, 4
CASES: dict[str, dict[str, Any]] = {
    "z0_fp32_ws2_plain": {"stage": 0},
    "z0_bf16_ws2_plain": {"stage": 0, "bf16": True},
    "z0_fp32_ws2_groups": {"stage": 0, "variant": "groups"},
    "z1_fp32_ws3_groups": {"stage": 1, "world_size": 3, "variant": "groups"},
    "z1_bf16_ws2_frozen": {"stage": 1, "bf16": True, "variant": "frozen"},
    "z1_bf16_ws2_sums": {"stage": 1, "bf16": True, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "z1_fp32_ws2_elastic": {"stage": 1, "zero": {"elastic_checkpoint": True}},
    "z2_fp32_ws4_plain": {"stage": 2, "world_size": 4},
    "z2_fp32_ws2_robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "z2_bf16_ws3_tied": {"stage": 2, "world_size": 3, "bf16": True, "variant": "tied"},
    "z3_fp32_ws3_frozen": {"stage": 3, "world_size": 3, "variant": "frozen"},
    "z3_bf16_ws4_groups": {"stage": 3, "world_size": 4, "bf16": True, "variant": "groups"},
    "z3_fp32_ws2_tied": {"stage": 3, "variant": "tied", "zero": {"sub_group_size": 300}},
}


def digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes, with its dtype and shape before it."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def make_config(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // case.get("world_size", 2),
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4,
                                                          "total_num_steps": 20}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
        "bf16": {"enabled": case.get("bf16", False)},
        "steps_per_print": 100000,
        **case.get("config", {}),
    }  # fmt: skip


def make_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, and the rest without weight decay."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """The mean loss over all ranks of each step."""
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    part = ROWS // world_size
    for step in range(first, first + steps):
        x, y = make_rows(step)
        loss = engine(x[rank * part : (rank + 1) * part], y[rank * part : (rank + 1) * part])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


def gather(engine: Any, net: nn.Module, stage: int) -> dict[str, str]:
    """Digests of the weights in fp32, the moments and the buffers, from the live engine."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"model.{name}": digest(buffer) for name, buffer in net.named_buffers()}
    if stage in (1, 2):
        found |= flat_digests(engine, {id(p): name for name, p in net.named_parameters()})
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                found[f"model.{name}"] = digest(parameter)
        elif stage == 3:
            found[f"model.{name}"] = digest(safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                moment = safe_get_full_optimizer_state(parameter, key)
                found[f"optimizer.{name}.{key}"] = digest(moment.view(parameter.ds_shape))
        elif stage == 0 and hasattr(engine.optimizer, "fp32_groups"):
            found |= half_digests(engine, name, parameter)
        elif stage == 0:
            found[f"model.{name}"] = digest(parameter)
            state = engine.optimizer.state[parameter]
            found |= {f"optimizer.{name}.{key}": digest(state[key]) for key in ("exp_avg", "exp_avg_sq")}
    return found


def flat_digests(engine: Any, names: dict[int, str]) -> dict[str, str]:
    """Stages 1 and 2: each group is one flat tensor, of which each rank has a part."""
    optimizer, found = engine.optimizer, {}
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    parts = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    for group, part in zip(groups, parts, strict=True):
        state = optimizer.optimizer.state[part]
        for kind, own in {"": part, ".exp_avg": state["exp_avg"], ".exp_avg_sq": state["exp_avg_sq"]}.items():
            ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, own.detach().contiguous())
            flat, start = torch.cat(ranks), 0
            for parameter in group:
                whole = flat[start : start + parameter.numel()].view(parameter.shape)
                name = names[id(parameter)]
                found[f"optimizer.{name}{kind}" if kind else f"model.{name}"] = digest(whole)
                start += parameter.numel()
    return found


def half_digests(engine: Any, name: str, parameter: Tensor) -> dict[str, str]:
    """Stage 0 in half precision: masters in lists beside the parameters."""
    pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
    [master] = [m for half, full in pairs for h, m in zip(half, full, strict=True) if h is parameter]
    state = engine.optimizer.optimizer.state[master]
    moments = {f"optimizer.{name}.{key}": digest(state[key]) for key in ("exp_avg", "exp_avg_sq")}
    return {f"model.{name}": digest(master), **moments}


def run(rank: int, world_size: int, store: str, out: str, names: list[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29513", DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, verbose=False)
    for name in names:
        case = CASES[name]
        net = SmallNet(case.get("variant", "plain"))
        groups = make_groups(net) if case.get("variant") == "groups" else None
        config = make_config(case)
        engine = deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]
        train(engine, 0, SAVED)
        folder = f"{out}/{name}"
        engine.save_checkpoint(folder, client_state={"epoch": 1, "note": "hello", "pair": (1, 2)})
        digests = gather(engine, net, case["stage"])
        losses = train(engine, SAVED, MORE)
        if rank == 0:
            Path(folder, "zero_to_fp32.py").unlink(missing_ok=True)
            about = {"config": config, "losses": losses, "digests": digests, "variant": case.get("variant", "plain")}
            Path(f"{out}/{name}.json").write_text(json.dumps(about, indent=1) + "\n")
        dist.barrier()
    os._exit(0)


def main(out: str, only: list[str]) -> None:
    chosen = {name: case for name, case in CASES.items() if not only or name in only}
    for world_size in (2, 3, 4):
        names = [name for name, case in chosen.items() if case.get("world_size", 2) == world_size]
        for name in names:
            shutil.rmtree(f"{out}/{name}", ignore_errors=True)
        if not names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(run, (world_size, f"{folder}/store", out, names), nprocs=world_size)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]), sys.argv[2:])
