"""The compilers on this machine, and why an op cannot be built with them."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils import cpp_extension

from dsjob.ops.registry import Op

# Without contraction, a compiler may not turn a * b + c into an fma: kernels say where they want one.
CXX_FLAGS = ("-O3", "-g0", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NVCC_FLAGS = ("-O3", "--expt-relaxed-constexpr")
# torch's own C++ library, before any that the compiler adds: a compiler that links libstdc++ statically gives the op a
# second copy of it, and the two mix when an error's message is formatted, which ends in a segmentation fault.
LINK_FLAGS = ("-fopenmp", *(("-l:libstdc++.so.6",) if sys.platform == "linux" else ()))


@dataclass(frozen=True)
class Toolchain:
    """What can compile.

    compiler, nvcc: a line of their `--version`, or empty where they are missing. torch: its version. cuda: the
    toolkit's version, such as "13.0". torch_cuda: that of torch, or empty for a build without CUDA.
    architectures: TORCH_CUDA_ARCH_LIST, or those of this machine's GPUs. headless: the folder in which torch looks for
    the toolkit, if the toolkit's headers are not there; otherwise empty.
    """

    compiler: str
    nvcc: str
    torch: str
    cuda: str
    torch_cuda: str
    architectures: str
    headless: str = ""


@cache
def find_toolchain() -> Toolchain:
    """Looks at this machine once."""
    compiler = _first_line([*shlex.split(os.environ.get("CXX") or "c++"), "--version"])
    nvcc_path = os.path.join(cpp_extension.CUDA_HOME, "bin", "nvcc") if cpp_extension.CUDA_HOME else "nvcc"
    version = _run([nvcc_path, "--version"])
    release = re.search(r"release (\d+\.\d+)", version)
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return Toolchain(
        compiler,
        next((line for line in version.splitlines() if "release" in line), ""),
        torch.__version__,
        release[1] if release else "",
        torch.version.cuda or "",
        own_architectures() if wanted in ("", "native") else wanted,
        _find_headless(cpp_extension.CUDA_HOME),
    )


def _find_headless(home: str | None) -> str:
    """torch takes the folder above that of nvcc for the toolkit, also if that nvcc only starts another one."""
    if home is None or os.environ.get("CPATH"):
        return ""
    headers = (os.path.join(folder, "include", "cuda_runtime.h") for folder in (home, "/usr"))
    return "" if any(map(os.path.exists, headers)) else home


def find_problem(op: Op) -> str:
    """Why the op cannot be built here, and the remedy, in one line; empty if nothing is known to prevent it."""
    tools = find_toolchain()
    if not tools.compiler:
        chosen = os.environ.get("CXX")
        found = f"CXX is {chosen}, which cannot be run" if chosen else "no C++ compiler was found"
        return f"{found}: install g++ or clang++, or set CXX to one"
    return _find_cuda_problem(tools) if op.device == "cuda" else ""


def _find_cuda_problem(tools: Toolchain) -> str:
    """The three problems of Hugging Face's notes on installing CUDA extensions, and torch without CUDA."""
    if not tools.torch_cuda:
        return "this torch was built without CUDA: install one with CUDA from pytorch.org"
    if not tools.nvcc:
        home = cpp_extension.CUDA_HOME
        found_there = f"{home} has no bin/nvcc that runs" if home else "no CUDA toolkit was found"
        return (
            f"{found_there}: install CUDA {tools.torch_cuda}, as torch has it, "
            "and put its bin folder on PATH or set CUDA_HOME"
        )
    if tools.headless:
        return f"{tools.headless} has nvcc, but not include/cuda_runtime.h: set CUDA_HOME to the toolkit's own folder"
    if tools.cuda.split(".")[0] != tools.torch_cuda.split(".")[0]:
        return (
            f"nvcc is of CUDA {tools.cuda}, but torch was built with {tools.torch_cuda}: "
            f"set CUDA_HOME and PATH to a toolkit of version {tools.torch_cuda}"
        )
    limit = _first_refused_gcc(tools.cuda)
    found = re.search(r"g\+\+|gcc", tools.compiler) and re.search(r"(\d+)\.\d+\.\d+", tools.compiler)
    if limit and found and int(found[1]) >= limit:
        return (
            f"CUDA {tools.cuda} needs a g++ before version {limit}, but this is {found[1]}: "
            f"install g++-{limit - 1}, and set CXX=g++-{limit - 1} and CC=gcc-{limit - 1}"
        )
    return _find_target_problem(tools.architectures)


def _find_target_problem(architectures: str) -> str:
    """torch itself would stop with an IndexError or a ValueError, in the middle of a build."""
    allowed = 'such as "8.0;9.0"'
    if not architectures:
        return (
            f"there is no GPU to build for: set TORCH_CUDA_ARCH_LIST to the GPUs of the machines that run it, {allowed}"
        )
    shape = r"\d+\.\d[af]?(\+PTX)?|[A-Z][a-z]+(\+[A-Z][a-z]+)?"  # a number, or a name such as Ampere
    strange = [part for part in re.split(r"[; ]", architectures) if not re.fullmatch(shape, part)]
    if strange:
        found = f"TORCH_CUDA_ARCH_LIST is {architectures}, but {strange[0]!r} is no GPU architecture"
        return f"{found}: set numbers, {allowed}"
    return ""


def _first_refused_gcc(cuda: str) -> int | None:
    """The first major version of gcc that is too new for a CUDA toolkit, by torch's table; None where it has none."""
    bounds = cpp_extension.CUDA_GCC_VERSIONS.get(cuda)
    return int(bounds[1][0]) if bounds else None


def own_architectures() -> str:
    """Those of this machine's GPUs, like TORCH_CUDA_ARCH_LIST."""
    if not torch.cuda.is_available():
        return ""
    found = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def describe_use(op: Op) -> list[str]:
    """What a built library needs to be used, wherever it was built."""
    return [
        torch.__version__,
        platform.machine(),
        *CXX_FLAGS,
        *LINK_FLAGS,
        *(NVCC_FLAGS if op.device == "cuda" else ()),
    ]


def describe_tools(op: Op) -> list[str]:
    """What else a library depends on that is built here."""
    tools = find_toolchain()
    return [tools.compiler, *((tools.nvcc, tools.architectures) if op.device == "cuda" else ())]


def runs_on(built: str, own: str) -> bool:
    """Whether code for the architectures `built` runs on all of `own`. Both are like TORCH_CUDA_ARCH_LIST; if `built`
    has no numbers, torch has chosen what to build, which is nearly everything."""
    known = [(int(major), int(minor), bool(ptx)) for major, minor, ptx in re.findall(r"(\d+)\.(\d+)\w?(\+PTX)?", built)]

    def runs(major: int, minor: int) -> bool:
        return any((m == major and n <= minor) or (ptx and (m, n) <= (major, minor)) for m, n, ptx in known)

    return not known or all(runs(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", own))


def _first_line(command: list[str]) -> str:
    return next(iter(_run(command).splitlines()), "")


def _run(command: list[str]) -> str:
    """What a command prints; empty if it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
