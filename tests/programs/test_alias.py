"""`import deepspeed` under the stand-in: dsjob.deepspeed itself, for this process and its children only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dsjob.programs.alias import STAND_IN, stand_in


def run(code: str, *flags: str) -> str:
    environment = dict(os.environ)
    stand_in(environment)
    done = subprocess.run([sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_modules_and_classes_are_dsjobs_own_and_libraries_find_them() -> None:
    run(
        "import deepspeed, dsjob.deepspeed\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "import deepspeed.runtime.lr_schedules as schedules\n"
        "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "import dsjob.deepspeed.runtime.lr_schedules as own\n"
        "assert deepspeed is dsjob.deepspeed and schedules is own\n"
        "assert DeepSpeedEngine is dsjob.deepspeed.DeepSpeedEngine\n"
        "assert own.__spec__.name == own.__name__ == 'dsjob.deepspeed.runtime.lr_schedules', own.__spec__\n"
        "from transformers.integrations import is_deepspeed_available\n"
        "assert is_deepspeed_available()\n"
    )


def test_availability_checks_succeed_without_importing_torch() -> None:
    found = run(
        "import sys, importlib.util, importlib.metadata\n"
        "assert importlib.util.find_spec('deepspeed') is not None\n"
        "print(importlib.metadata.version('deepspeed'))\n"
        "assert importlib.metadata.metadata('deepspeed')['Name'] == 'deepspeed'\n"
        "assert 'torch' not in sys.modules and 'dsjob' not in sys.modules\n"
    )
    from dsjob.deepspeed import API_VERSION

    assert found.split() == [API_VERSION]


@pytest.mark.full
def test_a_missing_name_says_what_to_use_instead() -> None:
    run(
        "import importlib, deepspeed\n"
        "for name in ('inference', 'runtime.swap_tensor.utils'):\n"
        "    missing = name.removesuffix('.utils')\n"
        "    try:\n"
        "        importlib.import_module(f'deepspeed.{name}')\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert f'dsjob has no deepspeed.{missing}: ' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(name)\n"
    )


def test_a_child_process_has_it_and_an_isolated_one_has_not() -> None:
    child = "import importlib.util as u; print(u.find_spec('deepspeed').origin)"
    assert STAND_IN in run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)")
    assert STAND_IN not in run("import sys; print(sys.path)", "-I")


def test_the_stand_in_comes_once_and_first() -> None:
    environment, path = {"PYTHONPATH": f"/a{os.pathsep}{STAND_IN}"}, ["/b", STAND_IN]
    stand_in(environment, path)
    assert environment["PYTHONPATH"] == f"{STAND_IN}{os.pathsep}/a"
    assert path == [STAND_IN, "/b"]
