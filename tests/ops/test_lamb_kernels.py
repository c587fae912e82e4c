"""The CUDA kernels of Lamb: nvcc compiles them, and on a CPU they compute what dsjob's Lamb computes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernels import SOURCES, build_on_host, load_launches
from machine import lacks_commands
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.errors import BuildError
from dsjob.ops import lamb as kernels
from dsjob.optim import lamb
from dsjob.optim.lamb import Lamb
from dsjob.ranks.mesh import World

SIZES = (0, 1, 63, 64, 257, 16384, 16385, 40000)  # around threads, lanes and chunks (16384)
FORM: dict[str, Any] = {"eps": 1e-6, "eps_inside_root": False, "decay": 0.1}

WRAPPERS = """
void run(int count, int64_t* sizes, float** weights, float** gradients, float** averages, float** squares,
                    float* sums, float* totals, float* ratios, bool inside) {
    Table table = {};
    for (; table.tensors < count; ++table.tensors) {
        const int i = table.tensors;
        table.ends[i] = (i ? table.ends[i - 1] : 0) + int((sizes[i] + kChunk - 1) / kChunk);
        table.rates[i] = 0.01f * (i + 1);
        table.counts[i] = sizes[i];
        table.weights[i] = weights[i];
        table.gradients[i] = gradients[i];
        table.averages[i] = averages[i];
        table.squares[i] = squares[i];
    }
    const LambStep step = {0.9f, 0.99f, 1e-6f, 0.1f, inside};
    lamb_average(table, step, sums, totals, nullptr);
    lamb_apply(table, step, ratios, nullptr);
}
"""


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Views at odd addresses: no tensor begins at a multiple of a vector.
    return [torch.randn(size + 1, generator=generator)[1:] for size in SIZES]


def reference(w: Tensor, g: Tensor, m: Tensor, v: Tensor, rate: float, inside: bool) -> Tensor:
    """A step in float64, in place; the sums of squares of the weights and of the update."""
    m.copy_(0.9 * m + 0.1 * g)
    v.copy_(0.99 * v + 0.01 * g * g)
    update = m / ((v + 1e-6).sqrt() if inside else v.sqrt() + 1e-6) + 0.1 * w
    sums = torch.stack([w.square().sum(), update.square().sum()])
    w.sub_(rate * update)
    return sums


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as a library for the CPU."""
    if lacking := lacks_commands("g++"):
        pytest.skip(str(lacking))
    return load_launches("lamb", tmp_path_factory.mktemp("kernels"), WRAPPERS)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.full
def test_the_kernels_compute_lamb_on_a_cpu(inside: bool, host: ctypes.CDLL) -> None:
    weights, averages, squares = draw(0), [torch.zeros(s) for s in SIZES], [torch.zeros(s) for s in SIZES]
    w, m, v = ([tensor.double() for tensor in tensors] for tensors in (weights, averages, squares))
    ratios = torch.linspace(0.5, 2, len(SIZES))
    for step in (1, 2):
        gradients, totals = draw(step), torch.empty(len(SIZES), 2)
        sums = torch.empty(sum(-(-size // 16384) for size in SIZES), 2)
        lists = [
            (ctypes.c_void_p * len(SIZES))(*(tensor.data_ptr() for tensor in tensors))
            for tensors in (weights, gradients, averages, squares)
        ]
        others = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (sums, totals, ratios)]
        host.run(len(SIZES), (ctypes.c_int64 * len(SIZES))(*SIZES), *lists, *others, ctypes.c_bool(inside))
        for n, gradient in enumerate(gradients):
            expected = reference(w[n], gradient.double(), m[n], v[n], 0.01 * (n + 1) * float(ratios[n]), inside)
            torch.testing.assert_close(totals[n].double(), expected, rtol=1e-5, atol=0)
    for found, exact in ((weights, w), (averages, m), (squares, v)):
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_nvcc_compiles_the_kernels(tmp_path: Path, architecture: str) -> None:
    if lacking := lacks_commands("nvcc"):
        pytest.skip(str(lacking))
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    options = ["-std=c++17", "-O3", "--Werror", "all-warnings", "-gencode", target]
    command = ["nvcc", *options, "-c", str(SOURCES / "lamb" / "launch.cu"), "-o", str(tmp_path / "launch.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def make(seed: int, device: str, **options: Any) -> tuple[Lamb, list[nn.Parameter]]:
    weights = [nn.Parameter(tensor.to(device, copy=True)) for tensor in draw(seed) * 9]  # more than one table has
    return Lamb(weights, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, **options), weights


def step(optimizer: Lamb, weights: list[nn.Parameter], seed: int) -> None:
    for number, (weight, gradient) in enumerate(zip(weights, draw(seed) * 9, strict=True)):
        weight.grad = None if number == 3 else gradient.to(weight.device)
    optimizer.step()


def compare(device: str, **options: Any) -> None:
    """dsjob's Lamb with and without the kernels, and the state that it keeps."""
    plain, expected = make(0, device, **options)
    fused, found = make(0, device, **options)
    fused.native = True
    for seed in range(1, 4):
        step(plain, expected, seed)
        step(fused, found, seed)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
        state, other_state = fused.state[one], plain.state[other]
        assert state.keys() == other_state.keys()
        for key, value in other_state.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def check_binding(world: World, library: str) -> None:
    torch.ops.load_library(library)
    lamb._is_ready = lambda parameter: True  # they are on the CPU here
    for options in ({}, {"bias_correction": False, "eps_inside_sqrt": True, "max_coeff": 0.5}):
        compare("cpu", **options)
    check_errors("cpu")
    check_registration("cpu")


def check_registration(device: str) -> None:
    lists = [[tensor.to(device, copy=True) for tensor in draw(seed)] for seed in range(3)]
    squares = [tensor.abs() for tensor in lists[0]]
    torch.library.opcheck(torch.ops.dsjob.lamb_average_.default, (*lists, squares, 0.9, 0.99, 1e-6, False, 0.1))
    ratios, rates = torch.ones(len(SIZES), device=device), [0.1] * len(SIZES)
    given = (*lists[:2], squares, ratios, rates, 1e-6, False, 0.1)
    torch.library.opcheck(torch.ops.dsjob.lamb_apply_.default, given)


def check_errors(device: str) -> None:
    lists = [[tensor.to(device).contiguous() for tensor in draw(0)] for _ in range(4)]
    given: dict[str, Any] = {"betas": (0.9, 0.99), **FORM}
    with pytest.raises(ValueError, match="lists of different lengths"):
        kernels.average_(lists[0], lists[1], lists[2][1:], lists[3], **given)
    with pytest.raises(TypeError, match="gradients must be fp32"):
        kernels.average_(lists[0], [t.double() for t in lists[1]], *lists[2:], **given)
    with pytest.raises(ValueError, match=r"squares must be contiguous"):
        kernels.average_(*lists[:3], [torch.zeros(2 * s, device=device)[::2] for s in SIZES], **given)
    with pytest.raises(ValueError, match="averages: 1 elements instead of 0"):
        kernels.average_(*lists[:2], [t.new_zeros(1) for t in lists[0]], lists[3], **given)
    with pytest.raises(ValueError, match="ratios must be one fp32 number"):
        kernels.apply_(*lists[:3], torch.ones(3, device=device), [1.0] * len(SIZES), **FORM)


@pytest.mark.full
def test_the_binding_steps_as_torchs_operators_on_a_cpu(tmp_path: Path) -> None:
    if lacking := lacks_commands("g++"):
        pytest.skip(str(lacking))
    run_ranks(check_binding, 1, str(build_on_host("lamb", tmp_path)))


@pytest.mark.gpu
def test_the_kernels_for_gpus_step_as_torchs_operators() -> None:
    assert kernels.find_problem(build=True) == ""
    for options in ({}, {"bias_correction": False, "eps_inside_sqrt": True, "max_coeff": 0.5}):
        compare("cuda", **options)
    check_errors("cuda")
    lists = [[tensor.cuda() for tensor in draw(seed)] for seed in range(4)]
    first = kernels.average_(*lists, betas=(0.9, 0.99), **FORM)
    again = [[tensor.cuda() for tensor in draw(seed)] for seed in range(4)]
    assert torch.equal(first, kernels.average_(*again, betas=(0.9, 0.99), **FORM))  # from run to run
    check_registration("cuda")


def test_requiring_it_without_a_gpu_is_an_error() -> None:
    from engines import make_engine

    optimizer = {"type": "Lamb", "params": {"lr": 0.01}}
    with pytest.raises(BuildError, match=r"ops\.lamb: it steps Lamb for parameters on GPUs"):
        make_engine(0, optimizer=optimizer, ops={"lamb": "require"})
    assert make_engine(0, optimizer=optimizer).optimizer.native is False  # type: ignore[union-attr]
