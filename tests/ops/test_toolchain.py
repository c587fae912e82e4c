"""The problems of a machine's compilers, each with its own message and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsjob.ops import toolchain
from dsjob.ops.registry import OPS, Op
from dsjob.ops.toolchain import Toolchain, find_problem

GOOD = Toolchain(
    compiler="g++ (Ubuntu 13.3.0-6ubuntu2) 13.3.0",
    nvcc="Cuda compilation tools, release 13.0, V13.0.88",
    torch="2.11.0",
    cuda="13.0",
    torch_cuda="13.0",
    architectures="9.0",
)
CUDA = Op("kernel", "cuda", "tests", "nothing", ())


@pytest.mark.parametrize(
    ("change", "op", "problem"),
    [
        ({}, CUDA, ""),
        ({}, OPS["cpu_optimizers"], ""),
        ({"nvcc": "", "cuda": "", "torch_cuda": ""}, OPS["cpu_optimizers"], ""),
        ({"compiler": ""}, OPS["cpu_optimizers"], "no C++ compiler was found: install g++"),
        ({"torch_cuda": ""}, CUDA, "this torch was built without CUDA"),
        ({"nvcc": "", "cuda": ""}, CUDA, "no CUDA toolkit was found: install CUDA 13.0"),
        ({"architectures": ""}, CUDA, "there is no GPU to build for: set TORCH_CUDA_ARCH_LIST to the GPUs"),
        ({"architectures": ""}, OPS["cpu_optimizers"], ""),
        ({"architectures": "8.0;sm_90"}, CUDA, "TORCH_CUDA_ARCH_LIST is 8.0;sm_90, but 'sm_90' is no GPU arch"),
        ({"architectures": "7.5 8.0;9.0a;10.0+PTX;12.0f"}, CUDA, ""),
        ({"architectures": "Volta+Tegra;Hopper"}, CUDA, ""),
        ({"cuda": "12.4"}, CUDA, "nvcc is of CUDA 12.4, but torch was built with 13.0: set CUDA_HOME"),
        ({"headless": "/usr/local"}, CUDA, "/usr/local has nvcc, but not include/cuda_runtime.h: set CUDA_HOME"),
        ({"cuda": "13.2"}, CUDA, ""),  # minor versions work together
        (
            {"compiler": "g++ (GCC) 16.1.0"},
            CUDA,
            "CUDA 13.0 needs a g++ before version 16, but this is 16: install g++-15",
        ),
        ({"compiler": "clang version 20.1.0"}, CUDA, ""),
    ],
)
def test_each_problem_has_its_remedy(
    change: dict[str, str], op: Op, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: replace(GOOD, **change))
    found = find_problem(op)
    assert found.startswith(problem)
    assert bool(found) is bool(problem)


def test_a_problem_names_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    monkeypatch.setattr(toolchain.cpp_extension, "CUDA_HOME", "/opt/cuda")
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: replace(GOOD, compiler=""))
    assert find_problem(CUDA).startswith("CXX is g++-99, which cannot be run: install g++")
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: replace(GOOD, nvcc="", cuda=""))
    assert find_problem(CUDA).startswith("/opt/cuda has no bin/nvcc that runs: install CUDA 13.0")


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    monkeypatch.setenv("CXX", "a-compiler-that-does-not-exist")
    found = toolchain.find_toolchain.__wrapped__()
    assert found.architectures == "8.0;9.0"
    assert found.compiler == ""
    monkeypatch.setattr(toolchain, "own_architectures", lambda: "8.6")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    assert toolchain.find_toolchain.__wrapped__().architectures == "8.6"


def test_a_folder_above_nvcc_is_no_toolkit_without_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPATH", raising=False)
    monkeypatch.setattr(toolchain.os.path, "exists", lambda path: path == str(tmp_path / "include" / "cuda_runtime.h"))
    assert toolchain._find_headless(str(tmp_path)) == ""
    assert toolchain._find_headless("/usr/local") == "/usr/local"
    assert toolchain._find_headless(None) == ""


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "echo 'g++ of' ccache")
    assert toolchain.find_toolchain.__wrapped__().compiler == "g++ of ccache --version"


@pytest.mark.parametrize(
    ("built", "own", "runs"),
    [
        ("8.0;9.0", "9.0", True),
        ("8.0 9.0", "8.6", True),  # a later minor version
        ("8.6", "8.0", False),
        ("8.0", "9.0", False),
        ("8.0+PTX", "9.0", True),  # compiled when it is loaded
        ("9.0+PTX", "8.0", False),
        ("8.0;9.0a", "8.0;9.0", True),
        ("8.0", "8.0;9.0", False),
        ("8.0", "", True),  # no GPU
        ("", "9.0", True),
        ("Ampere", "8.0", True),
    ],
)
def test_which_gpus_a_library_runs_on(built: str, own: str, runs: bool) -> None:
    assert toolchain.runs_on(built, own) is runs
