"""The packing of signs: in C++, in CUDA run on a CPU, and in PyTorch's operators, against numpy in float64."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_kernels import SOURCES, build_on_host, load_launches
from machine import lacks_commands
from ranks import run_ranks
from torch import Tensor

from dsjob.ops import onebit
from dsjob.ranks.mesh import World

LACKING = lacks_commands(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
CPU = torch.device("cpu")
# Around vectors (16 numbers), warps (32), blocks (64) and stretches of threads (16,384); with spans of nothing.
WIDTHS = [[8], [16], [24, 8], [], [0], [0, 40, 0, 64, 0], [16384, 8], [32, 72, 16400]]
Compress = Callable[[Tensor, Tensor, Tensor, list[int]], tuple[Tensor, Tensor]]
Expand = Callable[[Tensor, Tensor, list[int]], Tensor]


def draw(rows: int, widths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, which of them are alive, and scales; no tensor begins at a multiple of a vector."""
    generator = torch.Generator().manual_seed(seed)
    size = rows * sum(widths)
    numbers = torch.randn(size + 1, generator=generator)[1:]
    numbers[::7] = 0.0
    numbers[1::7] = -0.0
    alive = (torch.rand(size + 1, generator=generator) < 0.8)[1:]
    scales = torch.rand(rows * len(widths) + 1, generator=generator)[1:]
    shape = (rows, sum(widths))
    return numbers.view(shape), alive.view(shape), scales.view(rows, len(widths))


def native_compress(*arguments: Any) -> tuple[Tensor, Tensor]:
    assert onebit.find_problem(CPU, build=True) == ""
    return onebit.compress(*arguments, native=True)


def native_expand(*arguments: Any) -> Tensor:
    assert onebit.find_problem(CPU, build=True) == ""
    return onebit.expand(*arguments, native=True)


WAYS = [
    pytest.param(onebit.compress, onebit.expand, id="torch"),
    pytest.param(native_compress, native_expand, id="native", marks=needs_compiler),
]


@pytest.mark.parametrize(("compress", "expand"), WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_signs_and_errors_are_those_of_float64(compress: Compress, expand: Expand, rows: int) -> None:
    for widths in WIDTHS:
        numbers, alive, scales = draw(rows, widths)
        packed, errors = compress(numbers, alive, scales, widths)
        exact = numbers.double().numpy()
        assert np.array_equal(packed.numpy(), np.packbits(exact >= 0, axis=1, bitorder="little"))
        wide = np.repeat(scales.double().numpy(), widths, axis=1)
        meant = np.where(exact >= 0, wide, -wide)
        np.testing.assert_allclose(errors, np.where(alive.numpy(), exact - meant, 0), rtol=1e-6, atol=1e-7)
        assert np.array_equal(expand(packed, scales, widths).double().numpy(), meant)


@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_native_bits_are_torchs(rows: int) -> None:
    for widths in WIDTHS:
        numbers, alive, scales = draw(rows, widths)
        packed, errors = onebit.compress(numbers, alive, scales, widths)
        found, left = native_compress(numbers, alive, scales, widths)
        assert torch.equal(found, packed)
        assert torch.equal(left.view(torch.int32), errors.view(torch.int32))
        message = torch.cat([packed, torch.zeros(rows, 5, dtype=torch.uint8)], 1)[:, : packed.shape[1]]
        assert torch.equal(native_expand(message, scales, widths), onebit.expand(packed, scales, widths))


@pytest.mark.parametrize(("compress", "expand"), WAYS)
def test_nan_is_negative_and_spreads_by_its_scale(compress: Compress, expand: Expand) -> None:
    numbers = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0, 1.0, -1.0, 2.0, -0.0]])
    alive = torch.tensor([[True] * 7 + [False]])
    packed, errors = compress(numbers, alive, torch.tensor([[0.5]]), [8])
    assert packed.tolist() == [[0b11011010]]
    expected = [[float("nan"), float("inf"), -float("inf"), -0.5, 0.5, -0.5, 1.5, 0.0]]
    torch.testing.assert_close(errors, torch.tensor(expected), equal_nan=True)
    packed, errors = compress(numbers, alive, torch.tensor([[float("nan")]]), [8])
    assert bool(errors[alive].isnan().all())
    assert errors[0, 7] == 0
    assert bool(expand(packed, torch.tensor([[float("nan")]]), [8]).isnan().all())


@needs_compiler
def test_views_that_are_not_contiguous_and_repeated_runs_give_the_same() -> None:
    numbers, alive, scales = draw(3, [32, 72, 16400])
    first = native_compress(numbers, alive, scales, [32, 72, 16400])
    turned = [tensor.t().contiguous().t() for tensor in (numbers, alive, scales)]
    for _ in range(3):
        for given in ([numbers, alive, scales], turned):
            again = native_compress(*given, [32, 72, 16400])
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    packed = first[0].t().contiguous().t()
    assert torch.equal(native_expand(packed, scales, [32, 72, 16400]), onebit.expand(packed, scales, [32, 72, 16400]))


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(2, 12)}, "rows must be"),
        ({"rows": torch.zeros(2, 16).double()}, "rows must be fp32"),
        ({"alive": torch.zeros(2, 8, dtype=torch.bool)}, "alive must be"),
        ({"scales": torch.zeros(2, 3)}, "scales must be"),
        ({"widths": [8, 16]}, "the widths cover 24 elements of 16"),
        ({"widths": [4, 12]}, "width 4 is not whole bytes"),
        ({"widths": [-8, 24]}, "width -8"),
    ],
)
def test_wrong_shapes_are_errors(change: dict[str, Any], message: str) -> None:
    right = {
        "rows": torch.zeros(2, 16),
        "alive": torch.ones(2, 16).bool(),
        "scales": torch.ones(2, 2),
        "widths": [8, 8],
    }
    with pytest.raises((ValueError, TypeError), match=message):
        native_compress(*{**right, **change}.values())


@needs_compiler
def test_opcheck() -> None:
    numbers, alive, scales = draw(2, [24, 8])
    packed, _ = native_compress(numbers, alive, scales, [24, 8])
    torch.library.opcheck(torch.ops.dsjob.onebit_compress.default, (numbers, alive, scales, [24, 8]))
    torch.library.opcheck(torch.ops.dsjob.onebit_expand.default, (packed, scales, [24, 8]))


@needs_compiler
@pytest.mark.parametrize("limit", ["plain", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_CPU_ISA", limit)
    numbers, alive, scales = draw(3, [24, 48])
    packed, errors = native_compress(numbers, alive, scales, [24, 48])
    expected, left = onebit.compress(numbers, alive, scales, [24, 48])
    assert torch.equal(packed, expected)
    assert torch.equal(errors, left)
    assert torch.equal(native_expand(packed, scales, [24, 48]), onebit.expand(packed, scales, [24, 48]))
    used = torch.ops.dsjob.onebit_instruction_set()
    assert used in ("plain", "avx2", "avx512")[: ("plain", "avx2", "avx512").index(limit) + 1]


WRAPPERS = """
int run_compress(float* values, bool* alive, float* scales, int64_t* ends, int spans, uint8_t* packed, float* errors,
                 long rows, long width) {
    return compress_signs(values, alive, scales, ends, spans, packed, errors, rows, width, nullptr);
}
int run_expand(uint8_t* packed, long stride, float* scales, int64_t* ends, int spans, float* values, long rows,
               long width) {
    return expand_signs(packed, stride, scales, ends, spans, values, rows, width, nullptr);
}
"""


@needs_compiler
@pytest.mark.full
def test_the_kernels_for_gpus_give_the_same_bits_on_a_cpu(tmp_path: Path) -> None:
    host = load_launches("onebit_cuda", tmp_path, WRAPPERS)
    for widths in ([8], [0, 40, 0, 64, 0], [32, 72, 200]):
        width = sum(widths)
        numbers, alive, scales = draw(3, widths)
        ends = torch.tensor(widths).cumsum(0)
        packed, errors = torch.empty(3, width // 8, dtype=torch.uint8), torch.empty(3, width)
        values = torch.empty(3, width)

        def call(name: str, *arguments: Tensor | ctypes.c_long | int) -> None:
            pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
            assert getattr(host, name)(*pointers) == 0

        shape = (ctypes.c_long(3), ctypes.c_long(width))
        call("run_compress", numbers, alive, scales, ends, len(widths), packed, errors, *shape)
        expected, left = onebit.compress(numbers, alive, scales, widths)
        assert torch.equal(packed, expected)
        assert torch.equal(errors, left)
        message = torch.cat([packed, packed[:, :1]], 1)
        stride = ctypes.c_long(message.stride(0))
        call("run_expand", message, stride, scales, ends, len(widths), values, *shape)
        assert torch.equal(values, onebit.expand(packed, scales, widths))


def compare_binding(world: World, library: str) -> None:
    torch.ops.load_library(library)
    for widths in ([8], [0, 40, 0, 64, 0], [32, 72, 200], []):
        numbers, alive, scales = draw(3, widths)
        packed, errors = onebit.compress(numbers, alive, scales, widths)
        found, left = onebit.compress(numbers, alive, scales, widths, native=True)
        assert torch.equal(found, packed)
        assert torch.equal(left, errors)
        message = torch.cat([packed, packed[:, :1]], 1)[:, : packed.shape[1]]
        expected = onebit.expand(packed, scales, widths)
        assert torch.equal(onebit.expand(message, scales, widths, native=True), expected)
    with pytest.raises(ValueError, match="the widths cover 8 elements of 16"):
        onebit.compress(torch.zeros(1, 16), torch.ones(1, 16).bool(), torch.ones(1, 1), [8], native=True)


@needs_compiler
@pytest.mark.full
def test_the_binding_for_gpus_gives_the_same_bits_on_a_cpu(tmp_path: Path) -> None:
    run_ranks(compare_binding, 1, str(build_on_host("onebit_cuda", tmp_path)))


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_nvcc_compiles_the_kernels(tmp_path: Path, architecture: str) -> None:
    if lacking := lacks_commands("nvcc"):
        pytest.skip(str(lacking))
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    options = ["-std=c++17", "-O3", "--Werror", "all-warnings", "-gencode", target]
    command = ["nvcc", *options, "-c", str(SOURCES / "onebit_cuda" / "launch.cu"), "-o", str(tmp_path / "launch.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_kernels_for_gpus_give_torchs_bits() -> None:
    cuda = torch.device("cuda")
    assert onebit.find_problem(cuda, build=True) == ""
    for widths in WIDTHS:
        numbers, alive, scales = (tensor.to(cuda) for tensor in draw(3, widths))
        packed, errors = onebit.compress(numbers, alive, scales, widths)
        for _ in range(3):
            found, left = onebit.compress(numbers, alive, scales, widths, native=True)
            assert torch.equal(found, packed)
            assert torch.equal(left, errors)
        expected = onebit.expand(packed, scales, widths)
        assert torch.equal(onebit.expand(packed, scales, widths, native=True), expected)
    torch.library.opcheck(torch.ops.dsjob.onebit_compress.default, (numbers, alive, scales, widths))
