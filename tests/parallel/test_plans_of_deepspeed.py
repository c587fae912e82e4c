"""Layers divided by DeepSpeed's rules: `partition_config`, presets, and the order of layers in a block."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_model import SPECS, WIDTH, FusedModel
from job_documents import find_problems, make_job
from ranks import run_ranks
from side_by_side import Engine, Run, compare, run_on
from torch import Tensor, nn

import dsjob
from dsjob.contract.divided import PartitionConfig, TensorParallel
from dsjob.deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from dsjob.errors import ConfigWarning, UsageError
from dsjob.parallel.tensor import partition_config
from dsjob.parallel.tensor.guesses import guess
from dsjob.parallel.tensor.plans import Choice
from dsjob.ranks.mesh import World
from dsjob.ranks.splits import Split, find_split

pytestmark = pytest.mark.slow


def train(model: nn.Module, section: dict[str, Any], stage: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, whole weights, and the number of parameters that this rank holds."""
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-6}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": section,
    }
    engine = dsjob.initialize(model=model, config=config)[0]
    rank, size = engine.world.data_rank, engine.world.data_size
    held, losses = sum(p.numel() for p in model.parameters()), []
    for step in range(4):
        torch.manual_seed(step)
        loss = engine(torch.randn(4, 6, WIDTH).chunk(size)[rank]).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()) / size)
    return losses, dict(engine.module_state_dict()), held


def train_fused(world: World, size: int, stage: int) -> Any:
    torch.manual_seed(0)
    section = {"autotp_size": size, "partition_config": {"layer_specs": SPECS, "strict_mode": True}}
    return train(FusedModel(), section if size > 1 else {}, stage)


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_a_model_divided_by_patterns_computes_what_one_rank_does(stage: int) -> None:
    (alone,) = run_ranks(train_fused, 1, 1, 0)
    found = run_ranks(train_fused, 4, 2, stage)
    totals = [a + b for a, b in zip(found[0][0], found[2][0], strict=True)]
    assert totals == pytest.approx(alone[0], rel=1e-5)
    for rank in found:
        assert rank[2] < 0.6 * alone[2] or stage == 3
        for name, weight in alone[1].items():
            torch.testing.assert_close(rank[1][name], weight, rtol=0, atol=2e-5)


def build(kind: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    heads = {"vocab_size": 47, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40}
    if kind == "opt":
        return t.OPTForCausalLM(t.OPTConfig(**heads, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0))
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig(**heads, **off, intermediate_size=64))
    if kind == "distilbert":
        sizes = {"vocab_size": 47, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
        return t.DistilBertForMaskedLM(t.DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0))
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 47, "dropout": 0.0}
    return t.BartForConditionalGeneration(t.BartConfig(**sizes, **heads, max_position_embeddings=40))


def train_language(world: World, kind: str, size: int) -> list[float]:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-6}},
        "tensor_parallel": {"autotp_size": size},
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = dsjob.initialize(model=build(kind), config=config)[0]
    said = [str(one.message) for one in told if one.category is ConfigWarning]
    assert any("has no plan, so its layers" in text for text in said) == (size > 1 and world.everyone.rank == 0)
    losses = []
    for step in range(3):
        tokens = torch.randint(3, 47, (4, 12), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["opt", "bert", "distilbert", "bart"])
@pytest.mark.full("distilbert", "bart")
def test_a_model_without_a_plan_computes_what_one_rank_does(kind: str) -> None:
    pytest.importorskip("transformers")
    (alone,) = run_ranks(train_language, 1, kind, 1)
    for rank in run_ranks(train_language, 2, kind, 2):
        assert rank == pytest.approx(alone, rel=1e-5)


def choose(model: nn.Module, preset: str | None, config: PartitionConfig | None) -> dict[str, Choice]:
    section: Any = TensorParallel(2, 0, "auto", preset, config, False, False)  # type: ignore[arg-type]
    return partition_config.choose(model, section) or {}


def test_presets_divide_the_layers_of_their_models() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            self.self_attn = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
            self.mlp = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("gate_proj", "up_proj", "down_proj")})

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer()]), "lm_head": nn.Linear(4, 4)})
    styles = {name.rpartition(".")[2]: choice.style for name, choice in choose(model, "llama", None).items()}
    rows = {"o_proj": "rowwise", "down_proj": "rowwise"}
    assert styles == dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise") | rows
    own: Any = [{"patterns": [r".*\.mlp\..*"], "partition_type": "skip"}, {"patterns": ["lm_head"], **row()}]
    merged = choose(model, "llama", PartitionConfig(True, own, ["lm_head"], False))
    assert merged["layers.0.mlp.up_proj"].style == "replicate"
    assert merged["layers.0.self_attn.q_proj"].style == "colwise"
    assert merged["lm_head"].style == "rowwise_split"
    alone = choose(model, "llama", PartitionConfig(False, own, ["lm_head"], False))
    assert "layers.0.self_attn.q_proj" not in alone
    with pytest.raises(UsageError, match=r"no pattern matches layers\.0\.self_attn\.q_proj\.weight"):
        choose(model, None, PartitionConfig(False, own, [], True))


def row() -> dict[str, str]:
    return {"partition_type": "row"}


def test_layers_that_share_a_weight_with_an_embedding() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "lm_head": nn.Linear(4, 8, bias=False)})
    model["lm_head"].weight = model["tokens"].weight
    gathered: Any = [{"patterns": ["lm_head"], "gather_output": True}, {"patterns": ["tokens"]}]
    found = choose(model, None, PartitionConfig(True, gathered, ["lm_head"], False))
    assert {choice.style for choice in found.values()} == {"replicate"}
    rows: Any = [{"patterns": ["lm_head"], **row()}]
    found = choose(model, None, PartitionConfig(True, rows, ["lm_head"], False))
    assert found == {"lm_head": Choice("rowwise_split"), "tokens": Choice("colwise_gather")}


def test_a_fused_layer_in_an_unknown_order_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        guess(FusedModel())
    assert "blocks.0.attention.qkv has 64 outputs for a layer with 32 inputs" in caught.value.message
    assert "sections" in caught.value.hint
    assert guess(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == {}


@pytest.mark.parametrize(
    ("section", "place", "message"),
    [
        ({"plan": {"a": "colwise"}, "preset_model": "llama"}, "preset_model", "cannot be combined with"),
        ({"preset_model": "lama"}, "preset_model", "lama"),
        (["(unclosed"], "patterns", "is not a regular expression"),
        ({"shape": [3, -1], **row()}, "shape", "applies only to partition_type column"),
        ({"shape": [-1, 3]}, "shape", "cannot be divided along partition_dim 0"),
        ({"shape": [3, -1], "gather_output": True}, "gather_output", "cannot be combined with shape"),
    ],
)
def test_contradictions_are_found_before_a_run(section: Any, place: str, message: str) -> None:
    if isinstance(section, list):
        section = {"partition_config": {"layer_specs": [{"patterns": section}]}}
    elif "plan" not in section and "preset_model" not in section:
        section = {"partition_config": {"layer_specs": [{"patterns": ["a"], **section}]}}
    problems = find_problems(make_job(tensor_parallel={"size": 2, **section}), world_size=2)
    found = [problem for problem in problems if place in problem.path]
    assert any(message in problem.message for problem in found), problems


def divide_one(world: World) -> None:
    """DeepSpeed's classes of divided layers compute what a whole layer does, and so do their gradients."""
    group, rank = torch.distributed.group.WORLD, world.everyone.rank
    torch.manual_seed(0)
    whole, x = nn.Linear(8, 6), torch.randn(3, 8)
    y = whole(x)
    y.square().sum().backward()
    for gathers in (False, True):
        torch.manual_seed(0)
        layer = LinearLayer(nn.Linear(8, 6), group, gather_output=gathers)
        own = layer(x)
        expected = y if gathers else y.chunk(2, -1)[rank]
        torch.testing.assert_close(own, expected)
        own.square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, whole.weight.grad.chunk(2)[rank])  # type: ignore[union-attr]
    torch.manual_seed(0)
    layer = LinearAllreduce(nn.Linear(8, 6), group)
    own = layer(x.chunk(2, -1)[rank])
    torch.testing.assert_close(own, y)
    own.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad.chunk(2, 1)[rank])  # type: ignore[union-attr]
    torch.testing.assert_close(layer.bias.grad, whole.bias.grad)
    assert isinstance(find_split(layer.weight), Split)


def test_divided_layers_of_a_models_own() -> None:
    run_ranks(divide_one, 2)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def train_own(world: World, divides: bool, stage: int) -> Any:
    torch.manual_seed(0)
    model = Feed()
    if not divides:
        return train(model, {}, 0)
    group = torch.distributed.group.WORLD
    model.up = LinearLayer(model.up, group)
    model.down = LinearAllreduce(model.down, group)  # type: ignore[assignment]
    skip = {"layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}
    return train(model, {"autotp_size": 2, "partition_config": skip}, stage)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_divides_its_layers_itself_trains_and_is_saved_as_a_whole(stage: int) -> None:
    (alone,) = run_ranks(train_own, 1, False, 0)
    for losses, weights, held in run_ranks(train_own, 2, True, stage):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert held < 0.6 * alone[2]
        for name, weight in alone[1].items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5)


PROGRAM = """
import json, sys, torch, deepspeed
sys.path.insert(0, {folder!r})
from fused_model import SPECS, WIDTH, FusedModel

torch.manual_seed(0)
config = {{"train_micro_batch_size_per_gpu": 4,
          "optimizer": {{"type": "AdamW", "params": {{"lr": 3e-3, "eps": 1e-6, "torch_adam": True}}}},
          "tensor_parallel": {{"autotp_size": 2, "partition_config": {{"layer_specs": SPECS}}}}}}
deepspeed.init_distributed(dist_backend="gloo")
engine = deepspeed.initialize(model=FusedModel(), config=config)[0]
losses = []
for step in range(6):
    torch.manual_seed(step)
    loss = engine(torch.randn(4, 6, WIDTH)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if torch.distributed.get_rank() == 0:
    json.dump({{"losses": losses}}, open("records.json", "w"))
"""


@pytest.mark.full
def test_patterns_divide_as_in_deepspeed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(Path(__file__).parents[1] / "support")))
    engines: tuple[Engine, Engine] = ("dsjob", "deepspeed")
    ours, theirs = (
        run_on(each, [Run(program, tmp_path / each)], imported=["torch", "deepspeed"])[0] for each in engines
    )
    assert len(ours["losses"]) == 6
    assert not compare(ours, theirs, 1e-5), json.dumps([ours, theirs])
