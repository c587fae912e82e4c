"""DeepSpeed's transformer layer against other implementations of it, and what each of its options saves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dsjob.deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from dsjob.errors import UsageError
from dsjob.ops.recomputed import norm_invertibly
from dsjob.ranks.mesh import World

SIZES: dict[str, Any] = {"hidden_size": 12, "heads": 3, "intermediate_size": 20}
STARTS: dict[str, Any] = {"num_hidden_layers": 2, "initializer_range": 0.3}
DROPOUT = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.1}
SAVINGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
BATCH, LENGTH = 2, 5
ORDERS = pytest.mark.parametrize("pre", [False, True], ids=["post-LN", "pre-LN"])

NAMED: dict[str, Any] = {
    "batch_size": 8, "hidden_size": 12, "intermediate_size": 20, "heads": 3, "attn_dropout_ratio": 0.1,
    "hidden_dropout_ratio": 0.2, "num_hidden_layers": 2, "initializer_range": 0.02,
}  # fmt: skip


def make_layer(dtype: torch.dtype = torch.float64, **options: Any) -> DeepSpeedTransformerLayer:
    """A layer whose norms and biases also have values of their own."""
    torch.manual_seed(0)
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**SIZES, **STARTS, **options}))
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach()[0]), std=0.2)
    return layer.to(dtype)


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden states, with a gradient, and a bool mask [B, S] that hides the end of one sequence."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, SIZES["hidden_size"], generator=generator, dtype=torch.float64)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[1, 3:] = False
    return x.to(dtype).requires_grad_(), mask


def train(layer: nn.Module, seed: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A layer's output, and the gradients of its input and parameters."""
    x, mask = draw(dtype)
    torch.manual_seed(seed)
    out = layer(x, mask)
    slope = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], slope)]


def split(tensor: Tensor) -> list[Tensor]:
    return list(tensor.detach().chunk(3))


def list_parts(layer: Any) -> list[list[Tensor]]:
    """The weights, and the biases, of a BertLayer of transformers, in DeepSpeed's order."""
    attention, own = layer.attention, layer.attention.self
    parts = [own.query, own.key, own.value, attention.output.dense, attention.output.LayerNorm]
    parts += [layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm]
    return [[getattr(part, kind) for part in parts] for kind in ("weight", "bias")]


def test_after_norm_it_is_berts_layer() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertLayer

    torch.manual_seed(0)
    names = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20, "layer_norm_eps": 1e-12}
    config = transformers.BertConfig(**names, hidden_act="gelu_pytorch_tanh", attn_implementation="eager")
    theirs = BertLayer(config).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    weights, biases = list_parts(theirs)
    ours = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**SIZES, pre_layer_norm=False), weights, biases)
    x, mask = draw()
    additive = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.float64).masked_fill(~mask[:, None, None], -10000)
    expected = theirs(x, additive)
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = ours(x, additive)
    torch.testing.assert_close(found, expected)
    leaves = [ours.attn_qkvw, ours.attn_qkvb, *list(ours.parameters())[2:]]
    found_gradients = torch.autograd.grad(found.square().sum(), [x, *leaves])
    others = [each for weight, bias in zip(weights, biases, strict=True) for each in (weight, bias)]
    theirs_found = torch.autograd.grad(expected.square().sum(), [x, *others])
    joined = [theirs_found[0], torch.cat(theirs_found[1:7:2]), torch.cat(theirs_found[2:7:2]), *theirs_found[7:]]
    for one, other in zip(found_gradients, joined, strict=True):
        torch.testing.assert_close(one, other)


def test_it_takes_the_place_of_berts_layers() -> None:
    transformers = pytest.importorskip("transformers")
    names = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes = {"vocab_size": 11, "max_position_embeddings": 8, "hidden_act": "gelu_pytorch_tanh"}
    model = transformers.BertModel(transformers.BertConfig(**names, **sizes)).eval()
    ids, mask = torch.arange(10).view(2, 5), draw()[1]
    expected = model(ids, attention_mask=mask.long()).last_hidden_state
    config = DeepSpeedTransformerConfig(**SIZES, pre_layer_norm=False, training=False)
    for number, layer in enumerate(model.encoder.layer):
        model.encoder.layer[number] = DeepSpeedTransformerLayer(config, *list_parts(layer))
    torch.testing.assert_close(model(ids, attention_mask=mask.long()).last_hidden_state, expected)
    with pytest.raises(UsageError, match=r"does not support (cache|past_key_values)"):
        model.encoder(torch.randn(2, 5, 12), past_key_values=())


@ORDERS
def test_it_is_torchs_encoder_layer(pre: bool) -> None:
    ours = make_layer(pre_layer_norm=pre)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation=lambda x: F.gelu(x, approximate="tanh"), layer_norm_eps=1e-12,
        batch_first=True, norm_first=pre, dtype=torch.float64,
    )  # fmt: skip
    first, second = ("norm", "attn_n") if pre else ("attn_n", "norm_")
    first = first + "_" * (first == "norm")
    names = {"self_attn.in_proj_": "attn_qkv", "self_attn.out_proj.": "attn_o", "linear1.": "inter_"}
    names |= {"linear2.": "output_", "norm1.": first, "norm2.": second}
    kinds = {"weight": "w", "bias": "b"}
    pairs = {
        theirs + long: ours + short for (theirs, ours), (long, short) in itertools.product(names.items(), kinds.items())
    }
    theirs.load_state_dict({name: ours.state_dict()[other] for name, other in pairs.items()})
    x, mask = draw()
    expected = theirs(x, src_key_padding_mask=~mask)
    slope = torch.linspace(-1, 2, expected.numel(), dtype=x.dtype).view(expected.shape)
    named = dict(theirs.named_parameters())
    wanted = [named[next(key for key, other in pairs.items() if other == name)] for name, _ in ours.named_parameters()]
    gradients = torch.autograd.grad(expected, [x, *wanted], slope)
    for one, other in zip(train(ours), [expected.detach(), *gradients], strict=True):
        torch.testing.assert_close(one, other)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [*((name,) for name in SAVINGS), (*SAVINGS, "stochastic_mode")], ids=",".join)
def test_no_option_changes_the_results(pre: bool, dtype: torch.dtype, options: tuple[str, ...]) -> None:
    """Also not the random numbers of dropout."""
    plain = train(make_layer(dtype, pre_layer_norm=pre, **DROPOUT), dtype=dtype)
    found = train(make_layer(dtype, pre_layer_norm=pre, **DROPOUT, **dict.fromkeys(options, True)), dtype=dtype)
    assert torch.equal(found[0], plain[0])
    # The gradients of a sum of rows with these slopes are of the size of the largest.
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@ORDERS
@pytest.mark.parametrize("thrifty", [False, True])
def test_gradients_are_those_of_finite_differences(pre: bool, thrifty: bool) -> None:
    layer = make_layer(pre_layer_norm=pre, **DROPOUT, **dict.fromkeys(SAVINGS, thrifty), intermediate_size=3)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x, mask = draw()

    def call(x: Tensor, *values: Tensor) -> Tensor:
        torch.manual_seed(5)
        out: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, mask))
        return out

    assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


def count_saved(layers: nn.Module, x: Tensor, mask: Tensor) -> int:
    """The bytes that autograd keeps until the backward pass, without parameters."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            x = layer(x, mask)
        x.square().sum()
    own = {parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [(), *((name,) for name in SAVINGS), SAVINGS], ids=",".join)
def test_each_option_saves_what_it_should(pre: bool, dtype: torch.dtype, options: tuple[str, ...]) -> None:
    count, rows, size = 3, BATCH * LENGTH, dtype.itemsize
    wide, inner = rows * SIZES["hidden_size"], rows * SIZES["intermediate_size"]
    scores = BATCH * SIZES["heads"] * LENGTH**2
    sums = 2 * rows * size  # mean and slope of a norm
    layer = (
        size * (3 * wide + 2 * scores + wide + 2 * inner) + scores + 2 * wide
    )  # attention, GELU, and masks of a byte
    layer += size * (4 * wide) + 2 * sums  # the norms' inputs, and what they or the layer before put into a product
    total = count * layer + size * wide  # the last output
    saved = {
        "normalize_invertible": 2 * (size * wide + sums - 4 * rows),  # what it keeps for each row is fp32
        "gelu_checkpoint": size * inner,
        "attn_dropout_checkpoint": size * scores,
    }
    given = {"pre_layer_norm": pre, **DROPOUT, **dict.fromkeys(options, True)}
    layers = nn.ModuleList(make_layer(dtype, **given) for _ in range(count))
    assert count_saved(layers, *draw(dtype)) == total - count * sum(saved[name] for name in options)


@ORDERS
def test_dropout(pre: bool) -> None:
    layer = make_layer(pre_layer_norm=pre, **DROPOUT)
    first, again, other = (train(layer, seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    layer.eval()
    assert torch.equal(train(layer, 3)[0], train(layer, 4)[0])
    assert torch.equal(train(layer)[0], train(make_layer(pre_layer_norm=pre))[0])  # a ratio of -1, the default


def test_masks() -> None:
    layer = make_layer()
    x, mask = draw()
    expected = layer(x, mask)
    additive = torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for same in (mask[:, None, None], additive, additive[:, None, None].expand(BATCH, 3, LENGTH, LENGTH)):
        torch.testing.assert_close(layer(x, same), expected)
    changed = x.detach().clone()
    changed[1, 3:] *= -1
    torch.testing.assert_close(layer(changed, mask)[1, :3], expected[1, :3])
    assert not torch.allclose(layer(changed)[1, :3], layer(x)[1, :3])
    for ratio, dtype in itertools.product((-1, 0.2), (torch.float64, torch.float16)):
        layer = make_layer(dtype, attn_dropout_ratio=ratio)
        assert layer(x.to(dtype), torch.zeros_like(mask)).isfinite().all()  # nothing may be attended to
    with pytest.raises(UsageError, match=r"attention_mask is torch.int64; expected torch.bool(.|\n)*mask.bool\(\)"):
        layer(x, mask.long())


@pytest.mark.parametrize("way", ["fp16", "autocast", "parameters"])
def test_half_precision(way: str) -> None:
    options = {**dict.fromkeys(SAVINGS, True), **DROPOUT}
    exact = train(make_layer(torch.float32, **options), dtype=torch.float32)
    if way == "parameters":
        found = train(make_layer(torch.bfloat16, **options), dtype=torch.bfloat16)
        tolerance = 0.1
    else:
        layer = make_layer(torch.float32, **options, fp16=way == "fp16")
        with torch.autocast("cpu", torch.float16, enabled=way == "autocast"):
            found = train(layer, dtype=torch.float32)
        assert {tensor.dtype for tensor in found} == {torch.float32}
        assert torch.equal(found[1], found[1].half().float())
        tolerance = 0.02
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize(("adjust", "residual"), [(True, 0.02 / 4), (False, 0.02)])
def test_first_weights(adjust: bool, residual: float) -> None:
    config = DeepSpeedTransformerConfig(
        hidden_size=128, heads=4, num_hidden_layers=8, initializer_range=0.02, adjust_init_range=adjust, training=False
    )
    torch.manual_seed(0)
    layer = DeepSpeedTransformerLayer(config)
    assert not layer.training
    assert layer.inter_w.shape == (512, 128)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 2:
            std = residual if name in ("attn_ow", "output_w") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, name in ("attn_nw", "norm_w"))), name


def test_names_are_deepspeeds() -> None:
    first, second = make_layer(), make_layer()
    assert " ".join(first.state_dict()) == (
        "attn_qkvw attn_qkvb attn_ow attn_ob attn_nw attn_nb inter_w inter_b output_w output_b norm_w norm_b"
    )
    assert second.config.layer_id == first.config.layer_id + 1 == DeepSpeedTransformerLayer.layer_id - 1
    x, _ = draw()
    for option in ("return_tuple", "huggingface"):
        outputs = make_layer(**{option: True})(x)
        assert isinstance(outputs, tuple)
        assert torch.equal(outputs[0], first(x))
    grads: list[Any] = []
    first(x, grads=grads).sum().backward()
    named = {name: gradient for gradient, name in grads}
    assert {"V_W", "V_B", "O_W", "N2_B", "int_W", "out_B", "norm_W"} < set(named)
    assert torch.equal(named["V_W"], first.attn_qkvw.grad[24:])
    assert torch.equal(named["int_B"], first.inter_b.grad)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_config_comes_from_json(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 8, "heads": 2, "vocab_size": 7, "gelu_checkpoint": true}', encoding=encoding)
    config = DeepSpeedTransformerConfig.from_json_file(file)
    assert (config.hidden_size, config.intermediate_size, config.gelu_checkpoint) == (8, 32, True)
    assert config.vocab_size == 7
    assert config.attn_dropout_ratio == -1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": -1}, "hidden_size is -1; it must be at least 1"),
        ({"heads": 5}, "hidden_size 12 does not divide into 5 heads"),
        ({"hidden_dropout_ratio": 1.0}, "hidden_dropout_ratio is 1.0; it must be below 1"),
        ({"initializer_range": -1}, "initializer_range is -1; give the standard deviation"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; adjust_init_range needs"),
    ],
)
def test_a_config_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_layer(**options)


def test_positional_arguments_have_the_order_of_every_version_of_deepspeed() -> None:
    """The manual of DeepSpeed 0.3 has local_rank in the ninth place, where 0.19 has layer_norm_eps."""
    eight = (8, 12, 20, 3, 0.1, 0.2, 2, 0.02)
    rest = {"local_rank": 3, "seed": 7, "fp16": True, "pre_layer_norm": False}
    now = DeepSpeedTransformerConfig(*eight, 1e-5, 3, 7, True, False, return_tuple=True)
    assert now == DeepSpeedTransformerConfig(**NAMED, **rest, layer_norm_eps=1e-5, return_tuple=True)
    earlier = DeepSpeedTransformerConfig(*eight, 3, 7, True, False, False, True, False, True, True, True, False)
    flags = {"gelu_checkpoint": True, "adjust_init_range": False, "attn_dropout_checkpoint": True}
    more = {"stochastic_mode": True, "huggingface": True, "training": False}
    assert earlier == DeepSpeedTransformerConfig(**NAMED, **rest, **flags, **more)
    assert DeepSpeedTransformerConfig(*eight) == DeepSpeedTransformerConfig(**NAMED)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'seed'"):
        DeepSpeedTransformerConfig(*eight, 3, 7, seed=1)
    with pytest.raises(TypeError, match="20 positional arguments"):
        DeepSpeedTransformerConfig(*eight, *[1] * 12)


def test_mistakes_are_named() -> None:
    config = DeepSpeedTransformerConfig(**SIZES, **STARTS)
    with pytest.raises(UsageError, match="7 initial tensors; expected 8: q, k, v, attention output"):
        DeepSpeedTransformerLayer(config, [torch.ones(12, 12)] * 7)
    with pytest.raises(UsageError, match=r"initial tensor for inter_b is \[12\]; this config needs \[20\]"):
        DeepSpeedTransformerLayer(config, None, [torch.ones(12)] * 8)
    with pytest.raises(UsageError, match="does not support output_attentions"):
        make_layer()(draw()[0], output_attentions=True)


def test_a_norm_with_weights_of_zero_gives_finite_gradients() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(3, 4, dtype=torch.float64)
    found = torch.autograd.grad(norm_invertibly(x, weight, bias, 1e-12), (x, weight, bias), slope)
    expected = torch.autograd.grad(F.layer_norm(x, (4,), weight, bias, 1e-12), (x, weight, bias), slope)
    assert found[1][1] == 0
    kept = torch.tensor([True, False, True, True])
    torch.testing.assert_close(found[1][kept], expected[1][kept])
    torch.testing.assert_close(found[0][:, kept], expected[0][:, kept])
    assert found[0].isfinite().all()


@ORDERS
@pytest.mark.full("post-LN")
def test_the_compiler_traces_it(pre: bool) -> None:
    layer = make_layer(torch.float32, pre_layer_norm=pre, **dict.fromkeys(SAVINGS, True), hidden_dropout_ratio=0.1)
    plain = make_layer(torch.float32, pre_layer_norm=pre, attn_dropout_ratio=0.2)
    for each in (layer, plain):
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        for one, other in zip(train(compiled, dtype=torch.float32), train(each, dtype=torch.float32), strict=True):
            torch.testing.assert_close(one, other)


def test_it_can_be_recomputed() -> None:
    layer = make_layer(**DROPOUT, **dict.fromkeys(SAVINGS, True))
    again = make_layer(**DROPOUT, **dict.fromkeys(SAVINGS, True))
    call = again.forward
    again.forward = lambda *given: checkpoint(call, *given, use_reentrant=False)  # type: ignore[method-assign]
    assert all(map(torch.equal, train(layer), train(again)))


class Stack(nn.Module):
    """Three layers and a mean square error."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(torch.float32, **options) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), y)


def train_stack(world: World) -> dict[Any, list[float]]:
    found = {}
    thrifty = dict.fromkeys(SAVINGS, True)
    recomputed = {"activation_checkpointing": {"mode": "full"}}
    cases = [(stage, options, {}) for stage, options in itertools.product(range(4), ({}, thrifty))]
    for stage, options, config in [*cases, (0, thrifty, recomputed), (3, thrifty, recomputed)]:
        torch.manual_seed(0)
        engine = make_engine(stage, net=Stack(pre_layer_norm=False, **DROPOUT, **options), **config)
        torch.manual_seed(world.data_rank)
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + world.data_rank)
            x, y = torch.randn(2, 2, LENGTH, 12, generator=generator)
            loss = engine(x, y)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        found[stage, bool(options), bool(config)] = losses
    return found


@pytest.mark.full
def test_every_stage_trains_it_alike() -> None:
    for found in run_ranks(train_stack, 2):
        first, *others = found.values()
        assert first[-1] < first[0]
        assert len(others) == 9
        for other in others:
            assert other == pytest.approx(first, abs=1e-5)


def test_attention_with_dropout_agrees_with_sdpa() -> None:
    """A ratio near 0 drops nothing."""
    one, other = make_layer(attn_dropout_ratio=1e-12), make_layer()
    x, mask = draw()
    torch.testing.assert_close(one(x, mask), other(x, mask))
