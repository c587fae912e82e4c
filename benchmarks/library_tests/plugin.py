"""A pytest plugin that lets the DeepSpeed tests of accelerate or transformers run on a CPU without the Hub."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.library_tests import conditions
from benchmarks.library_tests.models import MAKE


def _stay(test: Any) -> Any:
    return test


def _lift_accelerates() -> None:
    from accelerate.test_utils import testing

    testing.require_non_cpu = testing.require_fp16 = _stay


def _lift_transformers() -> None:
    from transformers import testing_utils as testing

    testing.require_torch_accelerator = testing.require_torch_multi_accelerator = testing.require_torch_fp16 = _stay
    testing.backend_device_count = lambda device: 2  # how many ranks a test starts
    testing.slow = _stay


def pytest_configure(config: pytest.Config) -> None:
    library = os.environ["LIBRARY_TESTS"]
    conditions.lift()
    if library == "accelerate":
        _lift_accelerates()
    else:
        _lift_transformers()
    os.chdir(tempfile.mkdtemp())
    MAKE[library]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Writes the result of each test as a line of JSON to the file that LIBRARY_TESTS_OUT names."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        failure = getattr(report.longrepr, "reprcrash", None)
        error = failure.message if failure else str(report.longrepr[2]) if report.skipped else ""
        if report.when != "teardown":
            entry = {"test": item.nodeid.split("/")[-1], "outcome": report.outcome, "error": error}
            with open(os.environ["LIBRARY_TESTS_OUT"], "a") as file:
                file.write(json.dumps(entry) + "\n")
