"""Builds native ops into the wheel if the environment asks for it: `DSJOB_BUILD_OPS=1 pip install .`

DS_BUILD_OPS=1 does the same, and DS_BUILD_<OP>=1 or =0 selects ops. Of all ops, those that cannot be built on this
machine are left out; one that is selected must be built. Everything else is in pyproject.toml.
"""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dsjob.ops.registry import choose_prebuilt, is_demanded

CHOSEN = choose_prebuilt()


class BuildPyAndOps(build_py):
    """Also compiles the chosen ops, into `dsjob/ops/built`."""

    def run(self) -> None:
        super().run()
        if CHOSEN and not self.editable_mode:
            from dsjob.ops.build import build_prebuilt
            from dsjob.ops.toolchain import find_problem

            folder = Path(self.build_lib, "dsjob", "ops", "built").resolve()
            folder.mkdir(parents=True, exist_ok=True)
            for op in CHOSEN:
                problem = "" if is_demanded(op) else find_problem(op)
                if problem:
                    sys.stdout.write(f"{op.name} is left out: {problem}\n")
                else:
                    build_prebuilt(op, folder)


options: dict[str, Any] = {}
if CHOSEN:
    # An isolated build gets a torch of its own to compile against, and the wheel only fits this kind of machine.
    options = {"setup_requires": ["torch>=2.11,<2.14"], "has_ext_modules": lambda: True}
setup(cmdclass={"build_py": BuildPyAndOps}, **options)
