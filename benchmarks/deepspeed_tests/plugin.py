"""A pytest plugin for the test process: writes each result as a line of JSON, and skips tests that have a result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def _out(ending: str = "") -> Path:
    return Path(os.environ["REHOST_OUT"] + ending)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Records the tests that DeepSpeed's own settings select, and keeps those without a result."""
    _out(".tests").write_text("".join(f"{item.nodeid}\n" for item in items))
    done = {json.loads(line)["test"] for line in _out().read_text().splitlines()} if _out().exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    """Records the running test, so that a hanging test can be identified."""
    _out(".now").write_text(nodeid)
    _out(".ranks").unlink(missing_ok=True)


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a result: that of the call, or of a failed setup or teardown."""
    if report.when != "call" and report.outcome == "passed":
        return
    error = trace = ""
    if report.outcome == "skipped":
        error = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        error, trace = crash.message if crash else str(report.longrepr), report.longreprtext
        told = [json.loads(line) for line in _out(".ranks").read_text().splitlines()] if _out(".ranks").exists() else []
        first = min(told, key=lambda one: "onnection" in one["error"], default=None)  # not who was left alone
        if first is not None:
            error, trace = first["error"], first["trace"]
    line = {"test": report.nodeid, "outcome": report.outcome, "error": error.strip()[:600], "trace": trace[-3000:]}
    with _out().open("a") as file:
        file.write(json.dumps({**line, "seconds": round(report.duration, 1)}) + "\n")
