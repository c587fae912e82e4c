"""CUDA ops built for a CPU: the real bindings and kernels, with each thread of a GPU as a thread of the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

STAND_INS = Path(__file__).parent / "host_cuda"  # in place of CUDA's headers and of the launches
SOURCES = Path(__file__).parents[2] / "ops" / "csrc"


def build_on_host(op: str, folder: Path) -> Path:
    """A library that registers the functions of `op` for tensors on the CPU. Takes 10 seconds."""
    torchs, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    includes = (STAND_INS, SOURCES / op, torchs, torchs / "torch" / "csrc" / "api" / "include")
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", *(f"-I{each}" for each in includes)]
    sources = [SOURCES / op / "binding.cpp", STAND_INS / f"{op}_launch.cpp"]
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", *options, *sources, *linked, "-o", folder / f"{op}.so"], check=True)
    return folder / f"{op}.so"
