"""The shape that is assumed for a number of parameters is that of a real model, and plans the same."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsjob.planning.communication import predict_checkpoint, predict_communication
from dsjob.planning.memory import predict_memory
from dsjob.planning.model import Layout, Model, OptimizerState, count
from dsjob.planning.shapes import LLAMAS, Llama, assume_model
from dsjob.training.probe import size_model

ADAM = OptimizerState(2, 4)
GIB = 1 << 30


def build(llama: Llama) -> Model:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=llama.hidden,
        intermediate_size=llama.inner,
        num_hidden_layers=llama.blocks,
        num_attention_heads=llama.hidden // 128,
        num_key_value_heads=llama.keys // 128,
        tie_word_embeddings=llama.tied,
    )
    with torch.device("meta"):
        return size_model(LlamaForCausalLM(config))


@pytest.mark.parametrize(
    ("llama", "parameters"), zip(LLAMAS, (1.2358e9, 3.2127e9, 8.0303e9, 70.554e9, 405.85e9), strict=True)
)
def test_the_shapes_are_those_of_the_models(llama: Llama, parameters: float) -> None:
    assert llama.elements == pytest.approx(parameters, rel=1e-4)


@pytest.mark.parametrize("llama", [LLAMAS[0], LLAMAS[3]], ids=["1B", "70B"])
def test_a_number_of_parameters_is_planned_like_the_model_that_has_it(llama: Llama) -> None:
    real, assumed = build(llama), assume_model(llama.elements)
    assert (count(real.weights), real.blocks) == (count(assumed.weights), assumed.blocks)
    for stage in range(4):
        layout = Layout(stage, 64, compute=2, reduce=2, grad_accum=2)
        expected, found = (predict_memory(model, layout, ADAM) for model in (real, assumed))
        for moment in ("forward", "backward", "step"):
            assert found.total(moment) == pytest.approx(expected.total(moment), rel=1e-3), (stage, moment)
        sent = [[each.bytes for each in predict_communication(model, layout)] for model in (real, assumed)]
        assert sent[1] == pytest.approx(sent[0][: len(sent[1])], rel=1e-3)
        saved = [predict_checkpoint(model, layout, ADAM) for model in (real, assumed)]
        assert saved[1].whole == pytest.approx(saved[0].whole, rel=1e-3)
        assert saved[1].rank == pytest.approx(saved[0].rank, rel=1e-2)


def test_70_billion_parameters_do_not_fit_where_a_llama_does_not() -> None:
    memory = predict_memory(assume_model(70 * 10**9), Layout(3, 64, compute=2, reduce=2), ADAM)
    assert memory.peak / GIB == pytest.approx(31.8, rel=0.01)


@pytest.mark.parametrize("parameters", [1, 7, 1000, 124_000_000, 7 * 10**9, 13 * 10**9, 10**12])
@pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (4, 1), (3, 2), (64, 8)])
def test_parts_have_as_many_parameters_as_they_divide_into(parameters: int, stages: int, tensor: int) -> None:
    part = assume_model(parameters, stages=stages, tensor=tensor)
    assert count(part.weights) == -(-parameters // (stages * tensor))
    assert part.assumed.startswith("Llama")
