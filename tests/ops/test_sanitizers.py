"""The tests of the CPU ops under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import lacks_commands

pytestmark = [pytest.mark.full, pytest.mark.slow]

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
BROKEN = """
#include <vector>
extern "C" float read(int at) { std::vector<float> four(4); return four.data()[at]; }
"""


def sanitized(folder: Path) -> dict[str, str]:
    """The environment of a Python process that loads libraries compiled with FLAGS, and builds ops with them."""
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {
        **os.environ,
        **dict.fromkeys(("CFLAGS", "CXXFLAGS"), FLAGS),
        "LDFLAGS": FLAGS.split()[0],
        "DSJOB_OPS_DIR": str(folder),
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing when it ends
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
