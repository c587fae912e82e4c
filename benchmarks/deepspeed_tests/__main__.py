"""Runs DeepSpeed's own unit tests against dsjob: how many pass, by file, and why the others do not.

    python -m benchmarks.deepspeed_tests CHECKOUT [FILE ...] [--results DIR] [--again] [--fresh] [--jobs 2]
    python -m benchmarks.deepspeed_tests --table [--results DIR]

CHECKOUT is a DeepSpeed repository (version 0.19.6). FILEs are relative to its `tests/unit`; by default, all of
`reasons.FILES`. The tests run unchanged, on the CPU with gloo; `rehost` replaces DeepSpeed by dsjob. Each result is
written at once, as a line of JSON, to `--results`. Tests with a result are not run again, except failed ones with
`--again`. The rank processes are reused until a test fails; with `--fresh`, each test has new ones.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_tests.reasons import FILES, find_reason

HERE = Path(__file__).parent


def result_file(results: Path, name: str) -> Path:
    """The path of the results of one test file."""
    return results / (name.removesuffix(".py").replace("/", ".") + ".jsonl")


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The last result of each test."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["test"]: entry for entry in map(json.loads, lines)}


def run_file(tests: Path, name: str, site: str, out: Path, seconds: float, keep: bool) -> None:
    """Runs one file. A test that hangs ends pytest, which is then restarted without that test.

    `keep`: the ranks of a test that passes run the next one.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}:{tests}:{os.environ.get('PYTHONPATH', '')}",
        "REHOST_OUT": str(out),
        "REHOST_KEEP": str(int(keep)),
        "DS_UNITTEST_TIMEOUT": "150",
        "LOCAL_SIZE": "8",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rehost_plugin", "-p", "no:cacheprovider", f"unit/{name}"]
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        now = Path(f"{out}.now")
        now.unlink(missing_ok=True)
        try:
            result = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return
        said = result.stdout + result.stderr
        if "Test hanged" in said:
            append(out, now.read_text(), "ranks hung")
        elif result.returncode in (0, 1, 5):
            return
        elif now.exists():
            append(out, now.read_text(), f"pytest ended with {result.returncode}: {said.strip()[-300:]}")
        else:
            append(out, f"unit/{name}", next((s for s in said.splitlines() if s.startswith("E  ")), said[-300:]))
            return


def append(out: Path, test: str, error: str) -> None:
    """Records the failure of a test that could not report it itself."""
    with out.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": "failed", "error": error, "trace": ""}) + "\n")


def forget_failures(out: Path) -> None:
    """Removes the results of failed tests, so that they run again."""
    kept = [entry for entry in read_results(out).values() if entry["outcome"] != "failed"]
    out.write_text("".join(json.dumps(entry) + "\n" for entry in kept))


def show(results: Path) -> None:
    """Prints a table with one row per file and the reasons of failures, then failures without a known reason."""
    total: collections.Counter[str] = collections.Counter()
    others: list[str] = []
    print("| file | tests | passed | failed | skipped | no result | why the others do not pass |")
    print("|---|---|---|---|---|---|---|")
    for name in FILES:
        out = result_file(results, name)
        entries, listed = read_results(out), Path(f"{out}.tests")
        found = listed.read_text().splitlines() if listed.exists() else []
        reasons: collections.Counter[str] = collections.Counter()
        counts = collections.Counter(entry["outcome"] for entry in entries.values())
        counts["tests"] = len(set(found) | set(entries))
        for entry in entries.values():
            if entry["outcome"] == "passed":
                continue
            reason = find_reason(entry)
            reasons[reason] += 1
            if reason == "other":
                others.append(
                    f"{entry['test'].removeprefix('unit/')}: {(entry['error'].splitlines() or [''])[0][:160]}"
                )
        missing = counts["tests"] - counts["passed"] - counts["failed"] - counts["skipped"]
        total += counts
        why = "; ".join(f"{reason[:60]} ({number})" for reason, number in reasons.most_common())
        cells = [name, counts["tests"], counts["passed"], counts["failed"], counts["skipped"], missing, why]
        print("| " + " | ".join(map(str, cells)) + " |")
    summary = f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"
    print(f"\n{total['tests']} tests: {summary}.")
    if others:
        print("\nOthers:\n")
        print("\n".join(f"- `{other}`" for other in others))


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSpeed's own unit tests against dsjob")
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--results", type=Path, default=Path("deepspeed-tests"))
    parser.add_argument("--again", action="store_true", help="rerun failed tests")
    parser.add_argument("--fresh", action="store_true", help="new processes for each test")
    parser.add_argument("--jobs", type=int, default=2, help="test files to run at the same time")
    parser.add_argument("--seconds", type=float, default=900, help="time limit per file")
    parser.add_argument("--table", action="store_true", help="show the results as a table")
    given = parser.parse_intermixed_args()
    results: Path = given.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    if given.checkout is not None:
        tests = (given.checkout / "tests").resolve()
        with tempfile.TemporaryDirectory() as site, ThreadPoolExecutor(given.jobs) as pool:
            Path(site, "sitecustomize.py").write_text((HERE / "rehost.py").read_text())
            Path(site, "rehost_plugin.py").write_text((HERE / "plugin.py").read_text())

            def run(name: str) -> None:
                out = result_file(results, name)
                if given.again:
                    forget_failures(out)
                run_file(tests, name, site, out, given.seconds, keep=not given.fresh)

            list(pool.map(run, given.files or FILES))
    if given.table:
        show(results)


if __name__ == "__main__":
    main()
