"""A pytest plugin for the tests' process: writes each result as a line of JSON, and leaves out what has one."""

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
    """Notes what there is to run, without what DeepSpeed's own settings leave out, and keeps what has no result yet."""
    _out(".tests").write_text("".join(f"{item.nodeid}\n" for item in items))
    done = {json.loads(line)["test"] for line in _out().read_text().splitlines()} if _out().exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    """Notes which test runs, for whoever finds that it hangs."""
    _out(".now").write_text(nodeid)
    _out(".ranks").unlink(missing_ok=True)


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a result: of the call, or of what went wrong before or after it."""
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
