"""The tests of the CPU ops under AddressSanitizer and UndefinedBehaviorSanitizer.

Those of the CUDA kernels on a CPU, too, and under ThreadSanitizer: with a thread of the host for each thread of a GPU,
they find what compute-sanitizer's memcheck and racecheck find on a GPU, for the sizes in the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_kernels import STAND_INS
from machine import lacks_commands

pytestmark = [pytest.mark.full, pytest.mark.slow]

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
SHIM = STAND_INS.parent / "cuda_on_host.h"
BROKEN = """
#include <vector>
extern "C" float read(int at) { std::vector<float> four(4); return four.data()[at]; }
"""
# Without the barrier, a thread reads what another writes.
RACE = """
__global__ void turn(const float* x, float* out) {
    __shared__ float row[64];
    row[threadIdx.x] = x[threadIdx.x];
    SYNC
    out[threadIdx.x] = row[63 - threadIdx.x];
}
extern "C" void run(const float* x, float* out) {
    on_host::launch({1, 64}, [](auto... each) { turn(each...); }, x, out);
}
"""


def sanitized(folder: Path, flags: str = FLAGS, first: str = "libasan.so") -> dict[str, str]:
    """The environment of a Python process that loads libraries compiled with `flags`, and builds ops with them."""
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in (first, "libstdc++.so")
    ]
    return {
        **os.environ,
        **dict.fromkeys(("CFLAGS", "CXXFLAGS"), flags),
        "LDFLAGS": flags.split()[0],
        "DSJOB_OPS_DIR": str(folder),
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing when it ends
        "TSAN_OPTIONS": "exitcode=66",
    }


def test_the_cpu_ops_pass_their_tests(tmp_path: Path) -> None:
    if lacking := lacks_commands("gcc", "c++"):
        pytest.skip(str(lacking))
    (tmp_path / "broken.cpp").write_text(BROKEN)
    compiler = ["c++", *FLAGS.split(), "-shared", "-fPIC", "broken.cpp", "-o", "broken.so"]
    subprocess.run(compiler, cwd=tmp_path, check=True)
    ops = tmp_path / "ops"
    ops.mkdir(mode=0o700)
    environment = sanitized(ops)

    def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )

    caught = run("-c", "import ctypes; ctypes.CDLL('./broken.so').read(4)", cwd=tmp_path)
    assert "heap-buffer-overflow" in caught.stderr, caught.stderr

    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_cpu_optimizers.py", "test_onebit.py")]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not nvcc", *files, cwd=here.parent.parent)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    built = list(ops.glob("*/*.so"))
    assert sorted(library.stem for library in built) == ["cpu_optimizers", "onebit"]
    assert all(b"__asan_report" in library.read_bytes() for library in built)


@pytest.mark.parametrize(("flags", "library"), [(FLAGS, "libasan.so"), ("-fsanitize=thread -g", "libtsan.so")])
def test_the_kernels_for_gpus_pass_their_tests_on_a_cpu(tmp_path: Path, flags: str, library: str) -> None:
    if lacking := lacks_commands("gcc", "g++"):
        pytest.skip(str(lacking))
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in ("transformer_kernels", "lamb_kernels", "onebit")]
    chosen = "(test_transformer_kernels or on_a_cpu) and not nvcc"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files],
        cwd=here.parent.parent,
        env=sanitized(tmp_path, flags, library),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "ThreadSanitizer" not in done.stdout + done.stderr


@pytest.mark.parametrize("barrier", ["", "__syncthreads();"])
def test_a_race_in_shared_memory_is_found(tmp_path: Path, barrier: str) -> None:
    if lacking := lacks_commands("gcc", "g++"):
        pytest.skip(str(lacking))
    (tmp_path / "race.cpp").write_text(f'#include "{SHIM}"\n{RACE.replace("SYNC", barrier)}')
    options = ["-std=c++20", "-O0", "-g", "-pthread", "-shared", "-fPIC", "-fsanitize=thread"]
    subprocess.run(["g++", *options, "race.cpp", "-o", "race.so"], cwd=tmp_path, check=True)
    code = "import ctypes; ctypes.CDLL('./race.so').run((ctypes.c_float * 64)(), (ctypes.c_float * 64)())"
    environment = sanitized(tmp_path, "-fsanitize=thread", "libtsan.so")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ("data race" in done.stderr) is (barrier == ""), done.stderr
    assert done.returncode == (66 if barrier == "" else 0)
