"""Compiles the simulated device, once on a machine for each version of torch and of these sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

NAME = "dsjob_simulated_cuda"
_HERE = Path(__file__).parent
_FLAGS = ("-O0", "-w", "-fPIC", "-std=c++20", f"-DTORCH_EXTENSION_NAME={NAME}")


def find_obstacle() -> str | None:
    """Why the device cannot be had on this machine; None where it can."""
    if torch.version.cuda or torch.version.hip:
        return "this torch has the real CUDA library, beside which none can be simulated"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the simulated device with"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers, to compile the simulated device with, are not installed"
    return None


def build() -> Path:
    """The compiled library. Processes that ask at the same time wait for the one that compiles it.

    Raises RuntimeError with the compiler's words where that fails.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root(), NAME)
    root.mkdir(parents=True, exist_ok=True)
    made = root / f"{_make_key()}.so"
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(made)
    return made


def load(library: Path) -> ModuleType:
    """Loads what `build` has compiled into this process, before it has asked torch for a CUDA device."""
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_key() -> str:
    digest = hashlib.sha256(repr((torch.__version__, sys.implementation.cache_tag, _FLAGS)).encode())
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(made: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    folder = made.with_suffix(".parts")
    folder.mkdir(exist_ok=True)
    headers = [f"-I{path}" for path in (_HERE, *include_paths(), sysconfig.get_paths()["include"])]
    places = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    # All sources as one: each alone would spend ten seconds on the same headers of torch.
    everything = folder / "everything.cpp"
    everything.write_text("".join(f'#include "{path.name}"\n' for path in sorted(_HERE.glob("*.cpp"))))
    made_here = folder / "all.so"
    _run("g++", "-shared", *_FLAGS, *headers, str(everything), "-o", str(made_here), *places, *libraries)
    os.replace(made_here, made)
    shutil.rmtree(folder)


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[-4:])} failed:\n{ended.stderr[-4000:]}")
