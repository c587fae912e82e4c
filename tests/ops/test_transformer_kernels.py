"""The CUDA kernels of the transformer layer: nvcc compiles them, and on a CPU they compute what torch computes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from host_kernels import SOURCES, load_launches
from machine import lacks_commands
from torch import Tensor
from torch.nn import functional as F

ROWS, WIDTH, EPS, RATIO = 5, 72, 1e-5, 0.25

WRAPPERS = """
int run_gelu(int kind, void* x, void* bias, void* out, long rows, int width) {
    return bias_gelu(Kind(kind), {rows, width}, x, bias, out, nullptr);
}
int run_gelu_backward(int kind, void* g, void* x, void* bias, void* to_x, long rows, int width) {
    return bias_gelu_backward(Kind(kind), {rows, width}, g, x, bias, to_x, nullptr);
}
int run_norm(int kind, void* x, void* bias, void* residual, void* weight, void* norm_bias, void* z, void* y,
             uint8_t* kept, float* mean, float* slope, float ratio, long seed, float eps, long rows, int width) {
    return drop_add_norm(Kind(kind), {rows, width}, {ratio, uint64_t(seed), 12}, eps, x, bias, residual, weight,
                         norm_bias, z, y, kept, mean, slope, nullptr);
}
int run_norm_backward(int kind, void* g, void* added, void* z_or_y, void* weight, void* norm_bias, float* mean,
                      float* slope, uint8_t* kept, float ratio, void* to_residual, void* to_x, long rows, int width) {
    return drop_add_norm_backward(Kind(kind), {rows, width}, {ratio, 0, 0}, g, added, z_or_y, weight, norm_bias, mean,
                                  slope, kept, to_residual, to_x, nullptr);
}
int run_columns(int kind, void* g, void* z_or_y, void* weight, void* norm_bias, float* mean, float* slope,
                float* to_weight, float* to_bias, long rows, int width) {
    return sum_columns(Kind(kind), {rows, width}, g, z_or_y, weight, norm_bias, mean, slope, to_weight, to_bias,
                       nullptr);
}
void run_draw(unsigned long seed, unsigned long before, unsigned long sequence, uint32_t* out) {
    const Four found = draw(seed, before, sequence);
    for (int i = 0; i < 4; ++i) out[i] = found.values[i];
}
"""
KINDS = [torch.float32, torch.float16, torch.bfloat16]
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


@every_kind
def test_bias_and_gelu(host: ctypes.CDLL, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, bias, gradient = draw(kind, ROWS, WIDTH), draw(kind, WIDTH), draw(kind, ROWS, WIDTH)
    leaves = widen(x, bias)
    expected = F.gelu(leaves[0] + leaves[1], approximate="tanh")
    expected.backward(gradient.double())
    out, to_x = torch.empty_like(x), torch.empty_like(x)
    call(host, "run_gelu", kind, x, bias, out, ROWS, WIDTH)
    call(host, "run_gelu_backward", kind, gradient, x, bias, to_x, ROWS, WIDTH)
    compare(out, expected)
    compare(to_x, leaves[0].grad)


@every_kind
@pytest.mark.parametrize("ratio", [0.0, RATIO])
@pytest.mark.parametrize("invertible", [False, True])
def test_bias_dropout_residual_and_norm(host: ctypes.CDLL, kind: torch.dtype, ratio: float, invertible: bool) -> None:
    torch.manual_seed(0)
    x, residual, to_y, to_z = (draw(kind, ROWS, WIDTH) for _ in range(4))
    bias, norm_bias, weight = draw(kind, WIDTH), draw(kind, WIDTH), draw(kind, WIDTH).abs() + 0.5
    z, y, to_residual, to_x = torch.empty(4, ROWS, WIDTH, dtype=kind)
    kept = torch.empty(ROWS, WIDTH, dtype=torch.bool) if ratio else None
    (mean, slope), sums = torch.empty(2, ROWS), torch.empty(3, WIDTH)
    where = None if invertible else mean
    source = y if invertible else z
    call(host, "run_norm", kind, x, bias, residual, weight, norm_bias, None if invertible else z, y, kept, where, slope,
         ratio, 7, EPS, ROWS, WIDTH)  # fmt: skip
    leaves = widen(x, residual, weight, norm_bias, bias)
    expected_z = leaves[1] + (leaves[0] + leaves[4]) * (kept if ratio else 1) / (1 - ratio)
    expected = F.layer_norm(expected_z, (WIDTH,), *leaves[2:4], EPS)
    compare(y, expected)
    if not invertible:
        compare(z, expected_z)
    torch.autograd.backward([expected, expected_z], [to_y.double(), to_z.double()])
    call(host, "run_norm_backward", kind, to_y, to_z, source, weight, norm_bias, where, slope, kept, ratio, to_residual,
         to_x if ratio else None, ROWS, WIDTH)  # fmt: skip
    to_x = to_x if ratio else to_residual
    call(host, "run_columns", kind, to_y, source, weight, norm_bias, where, slope, sums[0], sums[1], ROWS, WIDTH)
    call(host, "run_columns", kind, to_x, None, None, None, None, None, None, sums[2], ROWS, WIDTH)
    for one, leaf in zip((to_x, to_residual, *sums.to(kind)), leaves, strict=True):
        compare(one, leaf.grad)


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


@pytest.mark.parametrize("architecture", [pytest.param("80", marks=pytest.mark.full), "90"])
def test_nvcc_compiles_the_kernels(tmp_path: Path, architecture: str) -> None:
    if lacking := lacks_commands("nvcc"):
        pytest.skip(str(lacking))
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    options = ["-std=c++17", "-O3", "--Werror", "all-warnings", "-gencode", target]
    source = str(SOURCES / "transformer" / "launch.cu")
    done = subprocess.run(
        ["nvcc", *options, "-c", source, "-o", tmp_path / "launch.o"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
