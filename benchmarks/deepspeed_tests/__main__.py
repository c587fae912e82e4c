"""Runs DeepSpeed's own unit tests against dsjob: how many pass, by file, and why the others do not.

    python -m benchmarks.deepspeed_tests CHECKOUT [FILE ...] [--results DIR] [--again] [--fresh] [--jobs 2]
    python -m benchmarks.deepspeed_tests CHECKOUT [FILE ...] --engine deepspeed --results OWN
    python -m benchmarks.deepspeed_tests --table [--results DIR] [--own OWN]

CHECKOUT is a DeepSpeed repository (version 0.19.6). FILEs are relative to its `tests/unit`; by default, all of
`reasons.FILES`. The tests run unchanged, on the CPU with gloo; `rehost` replaces DeepSpeed by dsjob. Each result is
written at once, as a line of JSON, to `--results`. Tests with a result are not run again, except failed ones with
`--again`. The rank processes are reused until a test fails; with `--fresh`, each test has new ones.

`--engine deepspeed` runs the tests with the checkout's own DeepSpeed, to see which of them can pass on this machine.
`--table --own OWN` adds these results as a column.
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

from benchmarks.deepspeed_tests.reasons import FILES, FRESH, LENIENT, find_reason

HERE = Path(__file__).parent


def result_file(results: Path, name: str) -> Path:
    """The path of the results of one test file."""
    return results / (name.removesuffix(".py").replace("/", ".") + ".jsonl")


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The last result of each test."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["test"]: entry for entry in map(json.loads, lines)}


def run_file(tests: Path, name: str, site: str, out: Path, seconds: float, keep: bool, engine: str) -> None:
    """Runs one file. A test that hangs ends pytest, which is then restarted without that test.

    `keep`: the ranks of a test that passes run the next one. `engine`: dsjob or deepspeed.
    """
    own = f"{tests.parent}:" if engine == "deepspeed" else ""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}:{tests}:{own}{os.environ.get('PYTHONPATH', '')}",
        "REHOST_ENGINE": engine,
        "REHOST_OUT": str(out),
        "REHOST_KEEP": str(int(keep)),
        **({"DSJOB_LENIENT": "1"} if name in LENIENT else {}),
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


def show(results: Path, own: Path | None) -> None:
    """Prints a table with one row per file and the reasons of failures, then failures without a known reason.

    `own`: results of DeepSpeed itself. Then two more columns count the tests that it passes, and that both pass.
    """
    total: collections.Counter[str] = collections.Counter()
    others: list[str] = []
    columns = ["tests", "passed", "failed", "skipped", "no result", *(["DeepSpeed passes", "both pass"] if own else [])]
    print("| " + " | ".join(["file", *columns, "why the others do not pass"]) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for name in FILES:
        out = result_file(results, name)
        entries, listed = read_results(out), Path(f"{out}.tests")
        found = listed.read_text().splitlines() if listed.exists() else []
        counts = collections.Counter(entry["outcome"] for entry in entries.values())
        counts["tests"] = len(set(found) | set(entries))
        counts["no result"] = counts["tests"] - counts["passed"] - counts["failed"] - counts["skipped"]
        theirs = read_passed(result_file(own, name)) if own else set()
        counts["DeepSpeed passes"] = len(theirs)
        counts["both pass"] = len(theirs & read_passed(out))
        total += counts
        failures = [entry for entry in entries.values() if entry["outcome"] != "passed"]
        reasons = collections.Counter(map(find_reason, failures))
        others += [describe(entry) for entry in failures if find_reason(entry) == "other"]
        why = "; ".join(f"{reason[:60]} ({number})" for reason, number in reasons.most_common())
        print("| " + " | ".join([name, *(str(counts[column]) for column in columns), why]) + " |")
    print("\n" + ", ".join(f"{total[column]:,} {column}" for column in columns) + ".")
    if others:
        print("\nOthers:\n")
        print("\n".join(others))


def read_passed(out: Path) -> set[str]:
    """The tests of a file that passed."""
    return {name for name, entry in read_results(out).items() if entry["outcome"] == "passed"}


def describe(entry: dict[str, Any]) -> str:
    """A failed test with the first line of its error."""
    return f"- `{entry['test'].removeprefix('unit/')}: {(entry['error'].splitlines() or [''])[0][:160]}`"


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSpeed's own unit tests against dsjob")
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--results", type=Path, default=Path("deepspeed-tests"))
    parser.add_argument("--again", action="store_true", help="rerun failed tests")
    parser.add_argument("--fresh", action="store_true", help="new processes for each test")
    parser.add_argument("--jobs", type=int, default=2, help="test files to run at the same time")
    parser.add_argument("--seconds", type=float, default=900, help="time limit per file")
    parser.add_argument("--engine", choices=("dsjob", "deepspeed"), default="dsjob", help="what the tests test")
    parser.add_argument("--own", type=Path, help="results with --engine deepspeed, for --table")
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
                keep = not given.fresh and name not in FRESH
                run_file(tests, name, site, out, given.seconds, keep, given.engine)

            list(pool.map(run, given.files or FILES))
    if given.table:
        show(results, given.own)


if __name__ == "__main__":
    main()
