"""`python -m dsjob.ops.compiling DEVICE NAME FOLDER SOURCE...`: compiles FOLDER/out/NAME.so. `build` runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

from dsjob.ops.toolchain import CXX_FLAGS, LINK_FLAGS, NVCC_FLAGS


def describe_extension(device: str, name: str, sources: list[str]) -> Any:
    """The setuptools extension of an op. It is a plain library: Python loads it with torch.ops.load_library."""
    kind: Any = CUDAExtension if device == "cuda" else CppExtension
    return kind(
        name,
        sources,
        extra_compile_args={"cxx": list(CXX_FLAGS), **({"nvcc": list(NVCC_FLAGS)} if device == "cuda" else {})},
        extra_link_args=list(LINK_FLAGS),
        py_limited_api=True,  # it does not use Python at all, so one build serves every version
    )


class _Plain(BuildExtension):
    """Names the library as the registry does, without a suffix for Python's version."""

    def get_ext_filename(self, ext_name: str) -> str:
        return f"{ext_name.rpartition('.')[2]}.so"


def main(device: str, name: str, folder: Path, *sources: str) -> None:
    """Compiles with ninja where it is installed, and one file after the other otherwise."""
    (folder / "out").mkdir(mode=0o700)  # whatever the umask: nobody else may exchange the library
    arguments = ["build_ext", "--build-lib", str(folder / "out"), "--build-temp", str(folder / "objects")]
    setup(
        name="dsjob-ops",
        script_args=["--quiet", *arguments],
        ext_modules=[describe_extension(device, name, list(sources))],
        cmdclass={"build_ext": _Plain},
        packages=[],
        py_modules=[],
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
