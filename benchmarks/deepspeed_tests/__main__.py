"""DeepSpeed's own unit tests, run against dsjob: how many pass, file by file, and why the others do not.

    python -m benchmarks.deepspeed_tests CHECKOUT [FILE ...] [--results DIR] [--again] [--fresh] [--jobs 2]
    python -m benchmarks.deepspeed_tests --table [--results DIR]

CHECKOUT is a DeepSpeed repository (version 0.19.6); FILEs are below its `tests/unit`, all of `reasons.FILES` where none
is given. The tests run as they are, on CPU and gloo; `rehost` says what stands in for DeepSpeed. Each test's result is
a line of JSON in `--results`, written as it comes; what has a result is not run again, with `--again` what has failed.
Ranks run one test after the other until one fails; with `--fresh` each test has its own.
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
    """Where the results of one file of tests are."""
    return results / (name.removesuffix(".py").replace("/", ".") + ".jsonl")


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The last result of each test."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["test"]: entry for entry in map(json.loads, lines)}


def run_file(tests: Path, name: str, site: str, out: Path, seconds: float, keep: bool) -> None:
    """Runs one file; a test that hangs ends pytest, which is then started again without it.

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
    """Notes a test that could not tell itself that it failed."""
    with out.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": "failed", "error": error, "trace": ""}) + "\n")


def forget_failures(out: Path) -> None:
    """Leaves the results of what did not fail, so that the rest runs again."""
    kept = [entry for entry in read_results(out).values() if entry["outcome"] != "failed"]
    out.write_text("".join(json.dumps(entry) + "\n" for entry in kept))


def show(results: Path) -> None:
    """A table: a line a file, with the reasons why tests of it fail; then those that have no reason in the list."""
    total: collections.Counter[str] = collections.Counter()
    others: list[str] = []
    print("| file | tests | passed | failed | skipped | no result | why the rest does not pass |")
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
    print(f"\nIn all {total['tests']}: {total['passed']} pass, {total['failed']} fail, {total['skipped']} are skipped.")
    if others:
        print("\nOthers:\n")
        print("\n".join(f"- `{other}`" for other in others))


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSpeed's own unit tests against dsjob")
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--results", type=Path, default=Path("deepspeed-tests"))
    parser.add_argument("--again", action="store_true", help="run again what has failed")
    parser.add_argument("--fresh", action="store_true", help="new processes for each test")
    parser.add_argument("--jobs", type=int, default=2, help="files at the same time")
    parser.add_argument("--seconds", type=float, default=900, help="for one file at most")
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
