"""CUDA ops built for a CPU: their bindings, launches and kernels, with a thread of the host for each thread of a GPU.

The sources are those that nvcc compiles. Only two notations of CUDA are translated: launches, and shared memory whose
size a launch gives. Headers in `host_cuda` take the place of CUDA's.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import torch

STAND_INS = Path(__file__).parent / "host_cuda"
SOURCES = Path(__file__).parents[2] / "ops" / "csrc"
_LAUNCH = re.compile(r"(\w+(?:<[\w, ()]+>)?)<<<(.*?)>>>\(", re.DOTALL)
_LAUNCH_ON_HOST = r"on_host::launch(on_host::Shape(\2), [&](auto... each) { \1(each...); }, "
_SHARED = re.compile(r"extern __shared__ __align__\(16\) float (\w+)\[\];")


def build_on_host(op: str, folder: Path) -> Path:
    """A library that registers the functions of `op` for tensors on the CPU. Takes 10 seconds."""
    torchs, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    includes = (torchs, torchs / "torch" / "csrc" / "api" / "include")
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    sources = [SOURCES / op / "binding.cpp", _translate(op, folder)]
    _compile(folder / f"{op}.so", sources, *(f"-I{each}" for each in includes), *linked)
    return folder / f"{op}.so"


def load_launches(op: str, folder: Path, wrappers: str) -> ctypes.CDLL:
    """The functions in `wrappers`, which may call those of the op's `launch.h`, and what its kernels call."""
    text = f'#include "launch.h"\n#include "kernels.cuh"\nusing namespace dsjob;\nextern "C" {{\n{wrappers}\n}}\n'
    (folder / "wrappers.cpp").write_text(text)
    _compile(folder / "wrappers.so", [folder / "wrappers.cpp", _translate(op, folder)])
    return ctypes.CDLL(str(folder / "wrappers.so"))


def _translate(op: str, folder: Path) -> Path:
    """The launches of an op in plain C++; beside them, its kernels."""
    for path in (SOURCES / op).iterdir():
        if path.name != "binding.cpp":
            text = _LAUNCH.sub(
                r"on_host::launch(on_host::Shape(\2), [&](auto... each) { \1(each...); }, ", path.read_text()
            )
            text = _SHARED.sub(r"float* const \1 = on_host::shared.get();", text)
            (folder / ("launch.cpp" if path.suffix == ".cu" else path.name)).write_text(text)
    return folder / "launch.cpp"


def _compile(library: Path, sources: list[Path], *more: str) -> None:
    """CXXFLAGS may add sanitizers."""
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", *os.environ.get("CXXFLAGS", "").split()]
    includes = [f"-I{each}" for each in (STAND_INS, library.parent)]
    subprocess.run(["g++", *options, *includes, *sources, *more, "-o", library], check=True)
