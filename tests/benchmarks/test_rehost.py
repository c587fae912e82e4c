"""DeepSpeed's own tests can import what dsjob lacks, and fail where they use it (`benchmarks/deepspeed_tests`)."""

from __future__ import annotations

import sys
from pathlib import Path

from programs import run_program

ROOT = Path(__file__).parents[2]

PROGRAM = """
import benchmarks.deepspeed_tests.rehost
import deepspeed, dsjob.deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
assert deepspeed.initialize is dsjob.deepspeed.initialize
from deepspeed.runtime import config
import dsjob.deepspeed.runtime.config
assert config.DeepSpeedConfig is dsjob.deepspeed.runtime.config.DeepSpeedConfig
assert not isinstance(1, DeepSpeedZeroOptimizer_Stage3)
try:
    MoE()
except NotImplementedError as error:
    print(error)
"""


def test_a_missing_module_is_a_stub_that_fails_when_it_is_used() -> None:
    done = run_program([sys.executable, "-c", PROGRAM], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dsjob has no deepspeed.moe.layer.MoE\n"
