"""The state dict that accelerate's `get_state_dict` asks for at stage 3, and what programs do with it on every rank."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from dsjob import deepspeed
from dsjob.ranks.mesh import World


def save_as_programs_do(world: World) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=53, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    folder: list[Any] = [tempfile.mkdtemp() if world.data_rank == 0 else None]
    dist.broadcast_object_list(folder)
    state = engine._zero3_consolidated_16bit_state_dict()
    # Every rank calls it, but only rank 0 has weights to save.
    engine.module.save_pretrained(folder[0], is_main_process=world.data_rank == 0, state_dict=dict(state))
    dist.barrier()
    return whole, state, load_file(f"{folder[0]}/model.safetensors")


def test_rank_0_has_all_weights_and_every_rank_may_save_them() -> None:
    (whole, first, saved), (_, second, _) = run_ranks(save_as_programs_do, 2)
    assert second == {}
    assert first.keys() == whole.keys()
    for name, value in first.items():
        assert value.device.type == "cpu"
        assert torch.equal(value, whole[name])
    assert all(torch.equal(value, whole[name]) for name, value in saved.items())
