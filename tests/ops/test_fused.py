"""The fused parts of the transformer layer: gradients, shapes, random numbers, and when the layer uses them.

Their kernels run in `test_transformer_kernels.py`. Here, PyTorch's operators take their place; with `-m full` also the
binding and the kernels themselves, built for a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_kernels import SOURCES, build_on_host
from kernels_in_torch import IN_TORCH
from machine import lacks_commands
from torch import Tensor
from torch.nn import functional as F

from dsjob.deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from dsjob.ops import fused, transformer

ROWS, WIDTH, EPS, RATIO = 6, 8, 1e-5, 0.25


def is_registered() -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key("dsjob::bias_gelu", "CPU")
    return found


def test_a_row_and_the_sums_of_32_warps_fit_into_48_kib() -> None:
    widest = max(width for width in range(4, 1 << 14, 4) if fused.fits(torch.float32, width))
    assert 4 * (widest + 32) == 48 << 10
    assert f"kWidest = {widest};" in (SOURCES / "transformer" / "launch.h").read_text()


@pytest.fixture(scope="module", params=["torch", pytest.param("binding", marks=pytest.mark.full)], name="registered")
def _registered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Functions for tensors on a CPU."""
    if request.param == "binding":
        if lacking := lacks_commands("g++"):
            pytest.skip(str(lacking))
        torch.ops.load_library(str(build_on_host("transformer", tmp_path_factory.mktemp("ops"))))
    if is_registered():  # a binding stays
        yield
        return
    library = torch.library.Library("dsjob", "IMPL")
    for name, function in IN_TORCH.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def draw_norm() -> list[Tensor]:
    """x, bias, residual, weight and bias of the norm."""
    return [draw(ROWS, WIDTH), draw(WIDTH), draw(ROWS, WIDTH), draw(WIDTH), draw(WIDTH)]


def compare_gradients(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    slope = torch.linspace(-1, 2, expected.numel()).view(expected.shape)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, leaves, slope, retain_graph=True),
        torch.autograd.grad(expected, leaves, slope),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("recomputed", [False, True])
def test_gelu(recomputed: bool) -> None:
    torch.manual_seed(0)
    x, bias, weight = draw(2, 3, WIDTH), draw(WIDTH), draw(4, WIDTH)
    expected = F.linear(F.gelu(x + bias, approximate="tanh"), weight)
    project = (
        fused.project_bias_gelu if recomputed else lambda x, bias, weight: F.linear(fused.bias_gelu(x, bias), weight)
    )
    compare_gradients(project(x, bias, weight), expected, [x, bias, weight])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("ratio", [0.0, RATIO])
@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize("part", ["y", "z", "both"])
def test_norm(ratio: float, invertible: bool, part: str) -> None:
    torch.manual_seed(0)
    leaves = draw_norm()
    x, bias, residual, weight, norm_bias = leaves
    y, z, kept, *_ = torch.ops.dsjob.drop_add_norm(*leaves, ratio, EPS, invertible, part != "y")
    total = residual + (x + bias) * (kept / (1 - ratio) if ratio else 1)
    normed = F.layer_norm(total, (WIDTH,), weight, norm_bias, EPS)
    if part == "z":
        leaves = leaves[:3]
    combine: Any = {"y": lambda y, z: y, "z": lambda y, z: z, "both": lambda y, z: y + 2 * z}[part]
    compare_gradients(combine(y, z), combine(normed, total), leaves)


def make_mask(kind: str) -> Tensor | None:
    """For scores [2, 3, 4, 8]; with `odd`, one that begins and continues at no multiple of four elements."""
    every = torch.randn(2, 3, 4, 9)
    return {"none": None, "keys": every[:, :1, :1, :8], "odd": every[..., 1:], "heads": every[0, :, :1, :1]}[kind]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", ["none", "keys", "odd", "heads"])
def test_attention(kind: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    scores, values, mask = draw(2, 3, 4, 8), draw(2, 3, 8, 5), make_mask(kind)
    torch.manual_seed(1)
    kept = torch.ops.dsjob.softmax_drop(scores, None, 0.5, RATIO)[2]
    probabilities = (scores * 0.5 + (0 if mask is None else mask)).softmax(-1)
    expected = (probabilities * kept / (1 - RATIO)) @ values
    torch.manual_seed(1)
    found = fused.mix_dropped(scores, mask, values, scale=0.5, ratio=RATIO, recomputed=recomputed)
    compare_gradients(found, expected, [scores, values])


@pytest.mark.usefixtures("registered")
def test_dropout_follows_torchs_generator() -> None:
    given = draw_norm()
    masks = []
    for seed in (1, 1, None, 2):
        if seed is not None:
            torch.manual_seed(seed)
        masks.append(torch.ops.dsjob.drop_add_norm(*given, RATIO, EPS, False, False)[2])
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    assert not torch.equal(masks[2], masks[3])
    state = torch.get_rng_state()
    torch.ops.dsjob.drop_add_norm(*given, 0.0, EPS, False, False)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("invertible", [False, True])
def test_opcheck(invertible: bool) -> None:
    x, bias = draw(ROWS, WIDTH), draw(WIDTH)
    torch.library.opcheck(torch.ops.dsjob.bias_gelu.default, (x, bias))
    plain = [tensor.detach() for tensor in draw_norm()]
    torch.library.opcheck(torch.ops.dsjob.bias_gelu_backward.default, (plain[2], plain[0], plain[1]))
    torch.library.opcheck(torch.ops.dsjob.drop_add_norm.default, (*draw_norm(), 0.0, EPS, invertible, True))
    for ratio in (0.0, RATIO):
        y, z, kept, mean, slope = torch.ops.dsjob.drop_add_norm(*plain, ratio, EPS, invertible, False)
        source = y if invertible else z
        given = (plain[2], None, source, plain[3], plain[4], mean, slope, kept, ratio)
        torch.library.opcheck(torch.ops.dsjob.drop_add_norm_backward.default, given)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["none", "keys"])
def test_opcheck_of_attention(kind: str) -> None:
    given = (draw(2, 3, 4, 8), make_mask(kind), 0.5, RATIO)
    # Not test_aot_dispatch_*, which compare results of two calls, that draw other numbers.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dsjob.softmax_drop.default, given, test_utils=utils)
    _, probabilities, kept = torch.ops.dsjob.softmax_drop(*given)
    for with_dropped in (False, True):
        saved = (torch.randn(2, 3, 4, 8), probabilities.detach(), kept, 0.5, RATIO, with_dropped)
        torch.library.opcheck(torch.ops.dsjob.softmax_drop_backward.default, saved)


def make_layer(**options: Any) -> DeepSpeedTransformerLayer:
    torch.manual_seed(0)
    given = {"hidden_size": 8, "heads": 2, "intermediate_size": 12, "num_hidden_layers": 1, "initializer_range": 0.3}
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**given, **options}))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return layer


def train(layer: DeepSpeedTransformerLayer, compiled: Any = None) -> list[Tensor]:
    torch.manual_seed(1)
    x = draw(2, 5, 8)
    out = (layer if compiled is None else compiled)(x)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], torch.linspace(-1, 2, out.numel()).view_as(out))]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("pre", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize("options", [(), ("normalize_invertible",), ("gelu_checkpoint",)], ids=",".join)
def test_the_layer_computes_the_same(pre: bool, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(pre_layer_norm=pre, **dict.fromkeys(options, True))
    expected = train(layer)
    monkeypatch.setattr(layer, "_can_fuse", lambda x: True)
    for one, other in zip(train(layer), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("registered")
def test_the_layer_drops_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(hidden_dropout_ratio=0.4, pre_layer_norm=False)
    monkeypatch.setattr(layer, "_can_fuse", lambda x: True)
    first, again = train(layer), train(layer)
    assert all(map(torch.equal, first, again))
    layer.eval()
    assert not torch.equal(train(layer)[0], first[0])
    torch.testing.assert_close(train(layer)[0], train(make_layer(pre_layer_norm=False).eval())[0])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_layers_attention_drops_with_a_kernel(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(attn_dropout_ratio=0.4, attn_dropout_checkpoint=recomputed)
    x, mask = draw(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    calls: list[Tensor] = []
    mix = fused.mix_dropped

    def watch(scores: Tensor, *others: Any, **options: Any) -> Tensor:
        calls.append(scores)
        return mix(scores, *others, **options)

    monkeypatch.setattr(fused, "mix_dropped", watch)
    monkeypatch.setattr(layer, "_can_fuse", lambda x: True)
    torch.manual_seed(1)
    found = layer(x, mask)
    assert len(calls) == 1
    monkeypatch.setattr(fused, "fits_attention", lambda *given: False)
    torch.manual_seed(1)
    kept = torch.ops.dsjob.softmax_drop(calls[0], None, 1.0, 0.4)[2]
    monkeypatch.setattr(transformer, "drop", lambda p, ratio: p * kept / (1 - ratio))
    layer.config.attn_dropout_checkpoint = False
    leaves = [x, *layer.parameters()]
    compare_gradients(found, layer(x, mask), leaves)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("pre", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize("thrifty", [False, True])
@pytest.mark.full("torch-False-pre-LN", "torch-True-post-LN", "torch-False-post-LN")
def test_the_compiler_traces_the_kernels(pre: bool, thrifty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    savings = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
    options = {"attn_dropout_ratio": 0.3, "hidden_dropout_ratio": 0.2, **dict.fromkeys(savings, thrifty)}
    layer = make_layer(pre_layer_norm=pre, **options)
    monkeypatch.setattr(DeepSpeedTransformerLayer, "_can_fuse", lambda self, x: True)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one, other in zip(train(layer, compiled), train(layer), strict=True):
        torch.testing.assert_close(one, other)


def test_sdpa_computes_attention_with_dropout_where_it_has_a_kernel() -> None:
    class Parts(OnGpu):
        def __init__(self, dtype: torch.dtype, width: int, is_cuda: bool = True) -> None:
            super().__init__(dtype, is_cuda)
            self.shape, self.itemsize = (3, 2, 4, 5, width), dtype.itemsize

    has_kernel: Any = transformer._has_attention_kernel
    assert has_kernel(Parts(torch.bfloat16, 64))
    assert has_kernel(Parts(torch.float32, 4))
    assert not has_kernel(Parts(torch.float32, 6))
    assert not has_kernel(Parts(torch.float16, 12))
    assert not has_kernel(Parts(torch.float64, 64))
    assert not has_kernel(Parts(torch.bfloat16, 64, is_cuda=False))


class OnGpu:
    """Stands in for a tensor on a GPU."""

    def __init__(self, dtype: torch.dtype, is_cuda: bool = True) -> None:
        self.dtype, self.is_cuda = dtype, is_cuda


def test_only_what_the_kernels_take_is_fused() -> None:
    layer: Any = make_layer()
    assert layer.native is False  # no GPU
    assert not layer._can_fuse(OnGpu(torch.float32))
    layer.native = True
    assert layer._can_fuse(OnGpu(torch.bfloat16))
    assert not layer._can_fuse(OnGpu(torch.float64))
    assert not layer._can_fuse(OnGpu(torch.float32, is_cuda=False))
    odd: Any = make_layer(intermediate_size=10)
    odd.native = True
    assert not odd._can_fuse(OnGpu(torch.float32))


def test_on_a_machine_with_gpus_it_uses_only_what_has_been_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    told = {"problem": "transformer has not been built: run `dsjob ops build transformer`"}

    def find_problem(build: bool) -> str:
        asked.append(build)
        return told["problem"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transformer.fused, "find_problem", find_problem)
    assert make_layer().native is False
    told["problem"] = ""
    assert make_layer().native is True
    assert asked == [False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pre", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize("options", [(), ("normalize_invertible",), ("gelu_checkpoint",)], ids=",".join)
def test_on_a_gpu_the_layer_computes_the_same(dtype: torch.dtype, pre: bool, options: tuple[str, ...]) -> None:
    assert fused.find_problem(build=True) == ""
    given = {"hidden_size": 256, "heads": 4, "intermediate_size": 1024, "initializer_range": 0.05}
    layer = make_layer(pre_layer_norm=pre, **given, **dict.fromkeys(options, True)).to("cuda", dtype)
    x = torch.randn(4, 33, 256, device="cuda", dtype=dtype, requires_grad=True)
    found = []
    for native in (False, True, True):
        layer.native = native
        out = layer(x)
        assert isinstance(out, Tensor)
        found.append([out, *torch.autograd.grad(out.float().square().mean(), [x, *layer.parameters()])])
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    for plain, one, again in zip(*found, strict=True):
        torch.testing.assert_close(one, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max()))
        assert torch.equal(one, again)


@pytest.mark.gpu
def test_on_a_gpu_dropout_is_repeatable_and_passes_opcheck() -> None:
    assert fused.find_problem(build=True) == ""
    given = [tensor.detach().cuda() for tensor in draw_norm()]
    masks = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        masks.append(torch.ops.dsjob.drop_add_norm(*given, RATIO, EPS, False, False)[2])
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    torch.library.opcheck(torch.ops.dsjob.drop_add_norm.default, (*given, 0.0, EPS, False, True))
    torch.library.opcheck(torch.ops.dsjob.bias_gelu.default, (given[0], given[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [33, 128, 1024, 1030, 4096])
def test_on_a_gpu_attention_drops_as_torch_does(dtype: torch.dtype, keys: int) -> None:
    assert fused.find_problem(build=True) == ""
    kind: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    scores = torch.randn(2, 3, 40, keys, **kind, requires_grad=True)
    mask, slope = torch.randn(2, 1, 1, keys, **kind), torch.randn(2, 3, 40, keys, **kind)
    dropped, probabilities, kept = torch.ops.dsjob.softmax_drop(scores, mask, 0.5, RATIO)
    assert kept.float().mean().item() == pytest.approx(1 - RATIO, abs=0.02)
    wide = scores.detach().double().requires_grad_()
    exact = (wide * 0.5 + mask).softmax(-1)
    expected = exact * kept / (1 - RATIO)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    found = torch.autograd.grad(dropped, scores, slope)[0]
    (slopes,) = torch.autograd.grad(expected, wide, slope.double())
    for one, other in ((probabilities, exact), (dropped, expected), (found, slopes)):
        largest = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * largest)
    again = torch.ops.dsjob.softmax_drop_backward(slope, probabilities, kept, 0.5, RATIO, True)
    assert torch.equal(again[0], found)
    assert torch.equal(again[1], dropped)
