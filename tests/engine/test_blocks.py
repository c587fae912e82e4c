"""What a document asks of a model's blocks: which ones are changed, and that nothing else is."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from engines import build_net, make_engine, make_tokens, train_engine
from job_documents import make_job, resolve
from net import Net
from torch import Tensor, nn

from dsjob import checkpointing
from dsjob.compute.activation.recompute import Recomputed
from dsjob.contract.spec import JobSpec, view
from dsjob.engine.blocks import Compiled, prepare_blocks
from dsjob.errors import ConfigError, ContractError


def prepare(model: nn.Module, **sections: Any) -> nn.Module:
    prepare_blocks(model, view(JobSpec, resolve(make_job(**sections))))
    return model


def full(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": {"mode": "full", **keys}}


def list_changed(model: nn.Module, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module.forward, kind)]


@pytest.mark.parametrize(
    ("every", "blocks"),
    [(1, ["blocks.0", "blocks.1", "blocks.2"]), (2, ["blocks.0", "blocks.2"]), (3, ["blocks.0"]), (7, ["blocks.0"])],
)
def test_every_nth_block_is_computed_again(every: int, blocks: list[str]) -> None:
    assert list_changed(prepare(Net(), **full(interval=every)), Recomputed) == blocks


def test_nothing_is_changed_unless_asked_for() -> None:
    assert list_changed(prepare(Net()), object) == [name for name, _ in Net().named_modules()]
    assert list_changed(prepare(Net()), Recomputed) + list_changed(prepare(Net()), Compiled) == []
    assert list_changed(prepare(Net(), activation_checkpointing={"cpu_checkpointing": True}), Recomputed) == []


def test_another_engine_over_the_same_model_begins_anew() -> None:
    net = prepare(Net(), **full(), compile={"enabled": True, "backend": "eager"})
    prepare(net, **full(interval=2))
    assert list_changed(net, Recomputed) == ["blocks.0", "blocks.2"]
    assert not isinstance(net.blocks[0].forward.forward, (Recomputed, Compiled))
    assert list_changed(prepare(net), Compiled) + list_changed(net, Recomputed) == []


def test_blocks_that_share_a_parameter_with_the_rest_are_computed_again_too() -> None:
    net = Net()
    net.blocks[1].ln.weight = net.ln_f.weight
    assert list_changed(prepare(net, **full()), Recomputed) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_model_without_blocks_is_told_of() -> None:
    with pytest.raises(ContractError, match="Linear has no repeated blocks") as caught:
        prepare(nn.Linear(2, 2), **full())
    assert "dsjob.checkpointing.checkpoint" in caught.value.hint


def test_a_cache_for_generation_is_switched_off() -> None:
    net: Any = Net()
    net.config = type("Config", (), {"use_cache": True})()
    assert prepare(net).config.use_cache is True
    assert prepare(net, **full()).config.use_cache is False


def test_the_document_holds_for_calls_by_the_model_unless_the_program_has_set_them_up() -> None:
    prepare(Net(), activation_checkpointing={"number_checkpoints": 5})
    assert checkpointing._setup.store.section.number_checkpoints == 5
    checkpointing.configure(None, num_checkpoints=3)
    prepare(Net(), activation_checkpointing={"number_checkpoints": 5})
    assert checkpointing._setup.store.section.number_checkpoints == 3
    checkpointing._setup.configured = False
    prepare(Net())
    assert checkpointing._setup.store.section.number_checkpoints is None


@pytest.mark.parametrize("sections", [full(), {"compile": {"enabled": True, "backend": "eager"}}])
def test_a_copy_of_the_model_computes_with_its_own_weights(sections: dict[str, Any]) -> None:
    net = prepare(build_net(), **sections)
    x, y = make_tokens(0, 2)
    before = net(x, y).detach()
    other = copy.deepcopy(net)
    for parameter in net.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(other(x, y), before)
    other(x, y).backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in other.parameters())


@pytest.mark.parametrize("sections", [full(), {"compile": {"enabled": True, "backend": "eager"}}])
def test_a_model_can_be_pickled_as_before(sections: dict[str, Any]) -> None:
    net = prepare(build_net(), **sections)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x, y = make_tokens(0, 2)
    torch.testing.assert_close(loaded(x, y), net(x, y))
    assert loaded.state_dict().keys() == build_net().state_dict().keys()


def train(**config: Any) -> tuple[list[float], Any]:
    engine = make_engine(0, **config)
    return train_engine(engine, 0, 3), engine


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_train_as_others_do_and_are_compiled_once(backend: str, mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, _ = train()
    losses, engine = train(
        compile={"enabled": True, "backend": backend, "fullgraph": True}, activation_checkpointing={"mode": mode}
    )
    assert losses == pytest.approx(expected, rel=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # of three blocks, which are alike
    assert engine.module.state_dict().keys() == build_net().state_dict().keys()
    assert [name for name, _ in engine.module.named_parameters()] == [name for name, _ in Net().named_parameters()]


class Numbered(nn.Module):
    """A block that computes with an integer of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner, self.outer = number, nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) * self.number)


@pytest.fixture
def limits() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        yield
    torch._dynamo.reset()


def test_blocks_that_differ_in_an_integer_are_all_compiled(limits: None) -> None:
    model = nn.Sequential(*(Numbered(number) for number in range(12)))
    expected = model(torch.ones(1, 2))
    compiled = prepare(model, compile={"enabled": True, "backend": "eager"})
    torch.testing.assert_close(compiled(torch.ones(1, 2)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12


def test_a_block_that_is_compiled_no_more_is_told(limits: None) -> None:
    model = nn.Sequential(Numbered(0), Numbered(1))
    prepare(model, compile={"enabled": True, "backend": "eager"})

    def change() -> None:
        for number in range(20):
            model[0].number = number
            model(torch.ones(1, 2))

    with pytest.warns(UserWarning, match=r"compile: torch has compiled 'forward' .*test_blocks.* 16 times"):
        change()


def test_a_model_without_blocks_is_compiled_whole() -> None:
    model = prepare(nn.Linear(2, 2), compile={"enabled": True, "backend": "eager"})
    assert list_changed(model, Compiled) == [""]
    torch.testing.assert_close(
        model(torch.ones(1, 2)), nn.functional.linear(torch.ones(1, 2), model.weight, model.bias)
    )


def test_a_compiler_that_torch_does_not_know_is_named_with_those_it_knows() -> None:
    with pytest.raises(ContractError, match="no backend inducktor") as caught:
        prepare(Net(), compile={"enabled": True, "backend": "inducktor"})
    assert "inductor" in caught.value.hint


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_inductor_trains_as_torch_does(mode: str) -> None:
    expected, _ = train()
    losses, _ = train(compile={"enabled": True}, activation_checkpointing={"mode": mode})
    assert losses == pytest.approx(expected, rel=1e-5)


class Part(nn.Module):
    """Two products, both needed in the backward pass of what follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.out(self.into(x).sigmoid()).sin()
        return kept


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "products", "sigmoids"), [("none", 4, 2), ("full", 8, 4), ("selective", 4, 4)])
def test_the_selective_way_does_costly_operators_once(mode: str, products: int, sigmoids: int) -> None:
    engine = make_engine(0, net=Parts(), activation_checkpointing={"mode": mode})
    with Counter() as counter:
        engine.backward(engine(torch.ones(2, 3)))
    assert (counter.seen["addmm"], counter.seen["sigmoid"]) == (products, sigmoids)


def test_a_bare_deepspeed_config_says_the_same_things() -> None:
    with pytest.raises(ConfigError, match="selective cannot be combined with torch_autocast"):
        make_engine(1, activation_checkpointing={"mode": "selective"}, torch_autocast={"enabled": True})
    engine = make_engine(1, activation_checkpointing={"mode": "full", "interval": 2})
    assert list_changed(engine.module, Recomputed) == ["blocks.0", "blocks.2"]


def build_gpt2() -> nn.Module:
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    )
    return model


def build_t5() -> nn.Module:
    sizes = {"num_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "vocab_size": 64}
    model: nn.Module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    return model


def train_transformers(model: nn.Module, **config: Any) -> list[float]:
    torch.manual_seed(0)  # dropout
    engine = make_engine(0, net=model, **config).train()
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_gpt2, build_t5])
@pytest.mark.full("build_t5")
def test_models_of_transformers_train_as_before(build: Any) -> None:
    model = build()
    expected = train_transformers(copy.deepcopy(model))
    for mode in ("full", "selective"):
        assert train_transformers(copy.deepcopy(model), activation_checkpointing={"mode": mode}) == expected
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = train_transformers(model, compile={"enabled": True, "backend": "aot_eager"}, **full())
    assert compiled == pytest.approx(expected, rel=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 4  # T5's blocks are of two kinds, and the first of each makes the biases for the others
