"""The CUDA kernels of the transformer layer: nvcc compiles them, and on a CPU they compute what torch computes."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernels import SOURCES, load_launches
from machine import lacks_commands
from torch import Tensor
from torch.nn import functional as F

EPS, RATIO = 1e-5, 0.25

WRAPPERS = """
int run_gelu(int kind, void* x, void* bias, void* out, long rows, int width) {
    return bias_gelu(Kind(kind), {rows, width}, x, bias, out, nullptr);
}
int run_gelu_backward(int kind, void* g, void* x, void* bias, void* to_x, void* to_bias, float* slices, long rows,
                      int width) {
    return bias_gelu_backward(Kind(kind), {rows, width}, g, x, bias, to_x, to_bias, slices, nullptr);
}
int run_norm(int kind, void* x, void* bias, void* residual, void* weight, void* norm_bias, void* z, void* y,
             uint8_t* kept, float* mean, float* slope, float ratio, long seed, float eps, long rows, int width) {
    return drop_add_norm(Kind(kind), {rows, width}, {ratio, uint64_t(seed), 12}, eps, x, bias, residual, weight,
                         norm_bias, z, y, kept, mean, slope, nullptr);
}
int run_norm_backward(int kind, void* g, void* added, void* z_or_y, void* weight, void* norm_bias, float* mean,
                      float* slope, uint8_t* kept, float ratio, void* to_residual, void* to_x, void* sums,
                      float* slices, long rows, int width) {
    return drop_add_norm_backward(Kind(kind), {rows, width}, {ratio, 0, 0}, g, added, z_or_y, weight, norm_bias, mean,
                                  slope, kept, to_residual, to_x, sums, slices, nullptr);
}
int run_softmax(int kind, void* scores, void* mask, long by_batch, long by_head, long by_query, float scale,
                float ratio, long seed, void* dropped, void* probabilities, uint8_t* kept, long batch, long heads,
                long queries, int keys) {
    return softmax_drop(Kind(kind), {batch, heads, queries, keys}, {ratio, uint64_t(seed), 12}, scores,
                        {mask, by_batch, by_head, by_query}, scale, dropped, probabilities, kept, nullptr);
}
int run_softmax_backward(int kind, void* g, void* probabilities, uint8_t* kept, float scale, float ratio,
                         void* to_scores, void* dropped, long rows, int keys) {
    return softmax_drop_backward(Kind(kind), {1, 1, rows, keys}, {ratio, 0, 0}, g, probabilities, kept, scale,
                                 to_scores, dropped, nullptr);
}
int run_count(long rows, int width) { return count_slices({rows, width}); }
void run_draw(unsigned long seed, unsigned long before, unsigned long sequence, uint32_t* out) {
    const Four found = draw(seed, before, sequence);
    for (int i = 0; i < 4; ++i) out[i] = found.values[i];
}
"""
KINDS = [torch.float32, torch.float16, torch.bfloat16]
# Rows and width: less than a slice, a warp and a block of columns; and more.
SIZES = [(5, 72), (70, 264)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if lacking := lacks_commands("g++"):
        pytest.skip(str(lacking))
    return load_launches("transformer", tmp_path_factory.mktemp("kernels"), WRAPPERS)


def call(host: ctypes.CDLL, name: str, kind: torch.dtype, *arguments: Tensor | float | None) -> None:
    """Calls a function with pointers to tensors, C longs, an int at the end (the width) and C floats."""
    *others, width = arguments
    given: list[object] = [ctypes.c_int(KINDS.index(kind))]
    for argument in others:
        if isinstance(argument, Tensor):
            given.append(ctypes.c_void_p(argument.data_ptr()))
        elif argument is None:
            given.append(None)
        else:
            given.append(ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_long(argument))
    assert getattr(host, name)(*given, ctypes.c_int(width)) == 0  # type: ignore[arg-type]


def shorten(cases: Iterable[tuple[Any, ...]], kept: list[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test. Those not in `kept` run only with `-m full`."""
    return [pytest.param(*case, marks=[] if case in kept else pytest.mark.full) for case in cases]


def draw(kind: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(kind)


def widen(*leaves: Tensor) -> list[Tensor]:
    return [leaf.double().requires_grad_() for leaf in leaves]


def compare(found: Tensor, expected: Tensor) -> None:
    """The kernels compute in fp32, and round results."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[found.dtype]
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max())
    )


def make_slices(host: ctypes.CDLL, sums: int, rows: int, width: int) -> Tensor:
    """Memory for the sums of slices: NaN, where the kernels leave something out."""
    return torch.full((sums, host.run_count(ctypes.c_long(rows), width), width), torch.nan)


@every_kind
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_bias_and_gelu(host: ctypes.CDLL, kind: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x, bias, gradient = draw(kind, rows, width), draw(kind, width), draw(kind, rows, width)
    leaves = widen(x, bias)
    expected = F.gelu(leaves[0] + leaves[1], approximate="tanh")
    expected.backward(gradient.double())
    out, to_x, to_bias = torch.empty_like(x), torch.empty_like(x), torch.empty_like(bias)
    call(host, "run_gelu", kind, x, bias, out, rows, width)
    slices = make_slices(host, 1, rows, width)
    call(host, "run_gelu_backward", kind, gradient, x, bias, to_x, to_bias, slices, rows, width)
    compare(out, expected)
    compare(to_x, leaves[0].grad)
    compare(to_bias, leaves[1].grad)


@pytest.mark.parametrize(
    ("kind", "rows", "width", "ratio", "invertible"),
    shorten(
        ((kind, *size, *more) for kind, size, *more in itertools.product(KINDS, SIZES, [0.0, RATIO], [False, True])),
        [(torch.float32, 5, 72, 0.0, False), (torch.float16, 5, 72, RATIO, True),
         (torch.bfloat16, 5, 72, RATIO, False)],
    ),
)  # fmt: skip
def test_bias_dropout_residual_and_norm(
    host: ctypes.CDLL, kind: torch.dtype, rows: int, width: int, ratio: float, invertible: bool
) -> None:
    torch.manual_seed(0)
    x, residual, to_y, to_z = (draw(kind, rows, width) for _ in range(4))
    bias, norm_bias, weight = draw(kind, width), draw(kind, width), draw(kind, width).abs() + 0.5
    z, y, to_residual, to_x = torch.empty(4, rows, width, dtype=kind)
    kept = torch.empty(rows, width, dtype=torch.bool) if ratio else None
    (mean, slope), sums = torch.empty(2, rows), torch.empty(3, width, dtype=kind)
    where = None if invertible else mean
    source = y if invertible else z
    call(host, "run_norm", kind, x, bias, residual, weight, norm_bias, None if invertible else z, y, kept, where, slope,
         ratio, 7, EPS, rows, width)  # fmt: skip
    leaves = widen(x, residual, weight, norm_bias, bias)
    expected_z = leaves[1] + (leaves[0] + leaves[4]) * (kept if ratio else 1) / (1 - ratio)
    expected = F.layer_norm(expected_z, (width,), *leaves[2:4], EPS)
    compare(y, expected)
    if not invertible:
        compare(z, expected_z)
    torch.autograd.backward([expected, expected_z], [to_y.double(), to_z.double()])
    call(host, "run_norm_backward", kind, to_y, to_z, source, weight, norm_bias, where, slope, kept, ratio, to_residual,
         to_x if ratio else None, sums, make_slices(host, 3, rows, width), rows, width)  # fmt: skip
    for one, leaf in zip((to_x if ratio else to_residual, to_residual, *sums), leaves, strict=True):
        compare(one, leaf.grad)


# In warps and in blocks, with and without packs of four.
@pytest.mark.parametrize(
    ("kind", "keys", "masked"),
    shorten(
        itertools.product(KINDS, [1, 7, 72, 130, 1024, 1030, 1032], ["no mask", "keys", "all"]),
        [(torch.float32, 7, "keys"), (torch.bfloat16, 72, "keys"), (torch.float16, 130, "all"),
         (torch.float32, 1032, "keys"), (torch.bfloat16, 1030, "no mask")],
    ),
)  # fmt: skip
def test_mask_softmax_and_dropout(host: ctypes.CDLL, kind: torch.dtype, keys: int, masked: str) -> None:
    torch.manual_seed(0)
    shape, scale = (2, 3, 1 if keys > 999 else 5, keys), 0.3
    scores, gradient = 4 * draw(kind, *shape), draw(kind, *shape)
    mask = {"no mask": None, "keys": draw(kind, 2, 1, 1, keys), "all": draw(kind, *shape)}[masked]
    if mask is not None and keys > 1:
        mask[1, :, :, keys // 2 :] = -10000
    strides = mask.expand(shape).stride()[:3] if mask is not None else (0, 0, 0)
    dropped, probabilities, to_scores, again = torch.full((4, *shape), torch.nan, dtype=kind)
    kept = torch.full(shape, 2, dtype=torch.uint8)
    call(host, "run_softmax", kind, scores, mask, *strides, scale, RATIO, 7, dropped, probabilities, kept, *shape)
    leaf, *_ = widen(scores)
    expected = (leaf * scale + (0 if mask is None else mask.double())).softmax(-1)
    compare(probabilities, expected)
    assert int(kept.max()) <= 1
    expected = expected * kept / (1 - RATIO)
    compare(dropped, expected)
    expected.backward(gradient.double())
    rows = scores.numel() // keys
    call(host, "run_softmax_backward", kind, gradient, probabilities, kept, scale, RATIO, to_scores, again, rows, keys)
    compare(to_scores, leaf.grad)
    assert torch.equal(again, dropped)
    found = to_scores.clone()
    call(host, "run_softmax_backward", kind, gradient, probabilities, kept, scale, RATIO, to_scores, None, rows, keys)
    assert torch.equal(to_scores, found)


@pytest.mark.parametrize("keys", [72, 1030])
def test_softmax_of_what_is_not_finite_is_torchs(host: ctypes.CDLL, keys: int) -> None:
    scores = torch.zeros(1, 1, 4, keys)
    scores[0, 0, 0, 5], scores[0, 0, 1, 5], scores[0, 0, 2], scores[0, 0, 3, 5] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    dropped, probabilities = torch.empty(2, 4, keys)
    kept = torch.empty(4, keys, dtype=torch.uint8)
    call(host, "run_softmax", torch.float32, scores, None, 0, 0, 0, 1.0, RATIO, 7, dropped, probabilities, kept,
         1, 1, 4, keys)  # fmt: skip
    torch.testing.assert_close(probabilities, scores[0, 0].softmax(-1), equal_nan=True)


@pytest.mark.full
def test_attention_keeps_the_share_it_should(host: ctypes.CDLL) -> None:
    for keys in (256, 1032, 257):
        shape = (1, 1, 2000 // keys + 9, keys)
        scores, out = torch.zeros(shape), torch.empty(2, *shape)
        masks = []
        for seed in (7, 7, 8):
            kept = torch.empty(shape, dtype=torch.uint8)
            call(host, "run_softmax", torch.float32, scores, None, 0, 0, 0, 1.0, RATIO, seed, *out, kept, *shape)
            masks.append(kept.bool())
        assert torch.equal(masks[0], masks[1])
        assert not torch.equal(masks[0], masks[2])
        assert masks[0].float().mean().item() == pytest.approx(1 - RATIO, abs=0.04)


def test_dropout_keeps_the_share_it_should(host: ctypes.CDLL) -> None:
    rows, width = 10, 256
    zeros, ones = torch.zeros(rows, width), torch.ones(width)
    masks = []
    for seed in (7, 7, 8):
        kept, y, slope = torch.empty(rows, width, dtype=torch.bool), torch.empty(rows, width), torch.empty(rows)
        call(
            host,
            "run_norm",
            torch.float32,
            zeros,
            ones,
            zeros,
            ones,
            ones,
            None,
            y,
            kept,
            None,
            slope,
            RATIO,
            seed,
            EPS,
            rows,
            width,
        )
        masks.append(kept)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert masks[0].float().mean().item() == pytest.approx(1 - RATIO, abs=0.02)


@pytest.mark.parametrize(
    ("word", "numbers"),
    [
        (0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_random_numbers_are_philoxs(host: ctypes.CDLL, word: int, numbers: str) -> None:
    """The known answers of Random123."""
    out = (ctypes.c_uint32 * 4)()
    host.run_draw(*(ctypes.c_ulong(word) for _ in range(3)), out)
    assert " ".join(f"{number:08x}" for number in out) == numbers


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_nvcc_compiles_the_kernels(tmp_path: Path, architecture: str) -> None:
    if lacking := lacks_commands("nvcc"):
        pytest.skip(str(lacking))
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    options = ["-std=c++17", "-O3", "--Werror", "all-warnings", "-gencode", target]
    source = str(SOURCES / "transformer" / "launch.cu")
    options += ["-Xptxas", "-v"]
    done = subprocess.run(
        ["nvcc", *options, "-c", source, "-o", tmp_path / "launch.o"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"entry function '(\w+)'(?:.|\n)*?(\d+) bytes spill stores(?:.|\n)*?Used (.*)", done.stderr)
    assert len(kernels) == 42
    for name, spilled, used in kernels:
        assert spilled == "0", name  # registers in memory
        if "softmax_drop" in name or name.startswith("_ZN5dsjob13drop_add_norm"):  # the rest of 48 KiB is the row's
            assert "smem" not in used or f"{4 * 32} bytes smem" in used, (name, used)
