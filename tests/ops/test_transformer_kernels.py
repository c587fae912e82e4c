"""The CUDA kernels of the transformer layer: nvcc compiles them, and on a CPU they compute what torch computes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from machine import lacks_commands
from torch import Tensor
from torch.nn import functional as F

SOURCES = Path(__file__).parents[2] / "ops" / "csrc" / "transformer"
SHIM = Path(__file__).parents[1] / "support" / "cuda_on_host.h"
ROWS, WIDTH, EPS, RATIO = 5, 72, 1e-5, 0.25

HOST = """
#include "SHIM"
#include "kernels.cuh"
using namespace dsjob;
const Index kBlock = {64, 1, 1};
extern "C" {
void run_gelu(float* x, float* bias, float* out, long count, int width) {
    launch(2, kBlock, [=] { bias_gelu(x, bias, out, count, width); });
}
void run_gelu_backward(float* g, float* x, float* bias, float* to_x, long count, int width) {
    launch(2, kBlock, [=] { bias_gelu_backward(g, x, bias, to_x, count, width); });
}
void run_norm(float* x, float* bias, float* residual, float* weight, float* norm_bias, float* z, float* y,
              uint8_t* kept, float* mean, float* slope, float ratio, long seed, float eps, long rows, int width) {
    launch(rows, kBlock, [=] {
        drop_add_norm(x, bias, residual, weight, norm_bias, z, y, kept, mean, slope, ratio, seed, 3, eps, width);
    });
}
void run_norm_backward(float* g, float* added, float* z_or_y, float* weight, float* norm_bias, float* mean,
                       float* slope, uint8_t* kept, float ratio, float* to_residual, float* to_x, long rows,
                       int width) {
    launch(rows, kBlock, [=] {
        drop_add_norm_backward(g, added, z_or_y, weight, norm_bias, mean, slope, kept, ratio, to_residual, to_x, width);
    });
}
void run_columns(float* g, float* z_or_y, float* weight, float* norm_bias, float* mean, float* slope, float* to_weight,
                 float* to_bias, long rows, int width) {
    launch((width + kColumns - 1) / kColumns, {kColumns, kStripes, 1}, [=] {
        sum_columns(g, z_or_y, weight, norm_bias, mean, slope, to_weight, to_bias, rows, width);
    });
}
void run_draw(unsigned long seed, unsigned long before, unsigned long sequence, uint32_t* out) {
    const Four found = draw(seed, before, sequence);
    for (int i = 0; i < 4; ++i) out[i] = found.values[i];
}
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if lacking := lacks_commands("g++"):
        pytest.skip(str(lacking))
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "host.cpp").write_text(HOST.replace("SHIM", str(SHIM)))
    options = ["-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run(["g++", *options, folder / "host.cpp", "-o", folder / "host.so"], check=True)
    return ctypes.CDLL(str(folder / "host.so"))


def call(host: ctypes.CDLL, name: str, *arguments: Tensor | float | None) -> None:
    """Calls a function with pointers to tensors, C longs, an int at the end (the width) and C floats."""
    *others, width = arguments
    given: list[object] = []
    for argument in others:
        if isinstance(argument, Tensor):
            given.append(ctypes.c_void_p(argument.data_ptr()))
        elif argument is None:
            given.append(None)
        else:
            given.append(ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_long(argument))
    getattr(host, name)(*given, ctypes.c_int(width))  # type: ignore[arg-type]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_bias_and_gelu(host: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    x, bias, slope = draw(ROWS, WIDTH), draw(WIDTH), torch.randn(ROWS, WIDTH)
    expected = F.gelu(x + bias, approximate="tanh")
    expected.backward(slope)
    out, to_x = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    call(host, "run_gelu", x, bias, out, x.numel(), WIDTH)
    call(host, "run_gelu_backward", slope, x, bias, to_x, x.numel(), WIDTH)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(to_x, x.grad)


@pytest.mark.parametrize("ratio", [0.0, RATIO])
@pytest.mark.parametrize("invertible", [False, True])
def test_bias_dropout_residual_and_norm(host: ctypes.CDLL, ratio: float, invertible: bool) -> None:
    torch.manual_seed(0)
    x, bias, residual, weight, norm_bias = draw(ROWS, WIDTH), draw(WIDTH), draw(ROWS, WIDTH), draw(WIDTH), draw(WIDTH)
    slope_y, slope_z = torch.randn(2, ROWS, WIDTH)
    z, y, to_residual, to_x = torch.empty(4, ROWS, WIDTH)
    kept = torch.empty(ROWS, WIDTH, dtype=torch.bool) if ratio else None
    (mean, slope), sums = torch.empty(2, ROWS), torch.empty(3, WIDTH)
    where = None if invertible else mean
    source = y if invertible else z
    call(host, "run_norm", x, bias, residual, weight, norm_bias, None if invertible else z, y, kept, where, slope,
         ratio, 7, EPS, ROWS, WIDTH)  # fmt: skip
    dropped = (x + bias) * (kept if ratio else 1) / (1 - ratio)
    expected_z = residual + dropped
    expected = F.layer_norm(expected_z, (WIDTH,), weight, norm_bias, EPS)
    torch.testing.assert_close(y, expected)
    if not invertible:
        torch.testing.assert_close(z, expected_z)
    torch.autograd.backward([expected, expected_z], [slope_y, slope_z])
    call(host, "run_norm_backward", slope_y, slope_z, source, weight, norm_bias, where, slope, kept, ratio, to_residual,
         to_x if ratio else None, ROWS, WIDTH)  # fmt: skip
    to_x = to_x if ratio else to_residual
    call(host, "run_columns", slope_y, source, weight, norm_bias, where, slope, sums[0], sums[1], ROWS, WIDTH)
    call(host, "run_columns", to_x, None, None, None, None, None, None, sums[2], ROWS, WIDTH)
    found = (to_x, to_residual, *sums)
    for one, leaf in zip(found, (x, residual, weight, norm_bias, bias), strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-4, atol=1e-4)


def test_dropout_keeps_the_share_it_should(host: ctypes.CDLL) -> None:
    rows, width = 10, 256
    zeros, ones = torch.zeros(rows, width), torch.ones(width)
    masks = []
    for seed in (7, 7, 8):
        kept, y, slope = torch.empty(rows, width, dtype=torch.bool), torch.empty(rows, width), torch.empty(rows)
        call(
            host, "run_norm", zeros, ones, zeros, ones, ones, None, y, kept, None, slope, RATIO, seed, EPS, rows, width
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
    source = str(SOURCES / "launch.cu")
    done = subprocess.run(
        ["nvcc", *options, "-c", source, "-o", tmp_path / "launch.o"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
