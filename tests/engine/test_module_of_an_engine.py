"""`engine.module` at every stage: what programs call on the model itself is what they would get of an unsharded one."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import run_ranks
from safetensors.torch import load_file

import dsjob
from dsjob.ranks.mesh import World

SIZES = {"vocab_size": 53, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": None}


def build() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SIZES, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    )


def make_engine(stage: int, bf16: bool) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    return dsjob.initialize(model=build(), config=config)[0]


def train(engine: Any, tokens: torch.Tensor, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def use_module(world: World, stage: int, bf16: bool) -> dict[str, Any]:
    tokens = torch.randint(0, 53, (2, 8), generator=torch.Generator().manual_seed(world.data_rank))
    engine, other = make_engine(stage, bf16), make_engine(stage, bf16)
    train(engine, tokens)
    train(other, tokens)
    shared: list[Any] = [tempfile.mkdtemp() if world.data_rank == 0 else None]
    dist.broadcast_object_list(shared)
    engine.module.save_pretrained(shared[0])
    state = engine.module.state_dict()
    tied = state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    state = {name: value.clone() for name, value in state.items()}
    part = {name: value.clone() for name, value in engine.module.transformer.state_dict().items()}
    expected = dict(engine.module_state_dict())
    dist.barrier()
    engine.eval()
    # One rank stops four tokens before the other, which needs its parts of the weights until the end.
    text = engine.module.generate(
        tokens[:, :3], max_new_tokens=4 + 4 * world.data_rank, do_sample=False, pad_token_id=0
    )
    engine.train()
    dist.barrier()
    return {
        "state": state,
        "tied": tied,
        "part": part,
        "expected": expected,
        "saved": load_file(f"{shared[0]}/model.safetensors"),
        "prompt": tokens[:, :3],
        "text": text,
        "after": train(engine, tokens),  # weights that `generate` gathered would be stale here
        "without": train(other, tokens),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(1, True), pytest.param(2, False, marks=pytest.mark.full), (3, True)])
@pytest.mark.full("1-True")
def test_the_model_itself_can_be_saved_and_generates(stage: int, bf16: bool) -> None:
    for rank, found in enumerate(run_ranks(use_module, 2, stage, bf16)):
        expected = found["expected"]
        assert found["state"].keys() == expected.keys()
        for name, value in found["state"].items():
            torch.testing.assert_close(value, expected[name].to(value.dtype), rtol=0, atol=0)
            assert value.dtype == (torch.bfloat16 if bf16 and value.is_floating_point() else value.dtype)
        assert {f"transformer.{name}" for name in found["part"]} == {
            n for n in expected if n.startswith("transformer.")
        }
        assert all(torch.equal(value, found["state"][f"transformer.{name}"]) for name, value in found["part"].items())
        assert all(torch.equal(value, found["state"][name]) for name, value in found["saved"].items())
        assert found["tied"]
        alone = build().to(torch.bfloat16 if bf16 else torch.float32).eval()
        alone.load_state_dict(expected)
        length = 4 + 4 * rank
        text = alone.generate(found["prompt"], max_new_tokens=length, do_sample=False, pad_token_id=0)
        assert torch.equal(found["text"], text)
        assert found["after"] == found["without"]
