"""DeepSpeed's own unit tests, run against dsjob: how many pass, file by file.

    python benchmarks/deepspeed_tests.py CHECKOUT [FILE ...] [--out results.jsonl] [--seconds 600]

CHECKOUT is a DeepSpeed repository (version 0.19.6), FILEs are below its `tests/unit`. The tests run as they are, on CPU
and gloo, in a process in which `import deepspeed` gives `dsjob.deepspeed`. What that lacks is a stub: importing it
works, using it fails the test that does. Every result is a line of JSON in `--out`, written as it comes.
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
from pathlib import Path

SITE = """
import importlib, importlib.abc, importlib.machinery, importlib.util, json, multiprocessing, sys, types

if importlib.util.find_spec("hjson") is None:
    sys.modules["hjson"] = json  # the tests write hjson that is JSON

class Stub(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stub(cls._path + "." + name)
    def __instancecheck__(cls, instance):
        return False
    def __call__(cls, *args, **kwargs):
        raise NotImplementedError("dsjob has no " + cls._path)

def make_stub(path):
    return Stub(path.rpartition(".")[2], (), {"_path": path})

class Shim(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "deepspeed":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        try:
            module = importlib.import_module("dsjob." + spec.name)
            return types.ModuleType(spec.name) if module is None else Mirror(spec.name, module)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("dsjob.deepspeed"):
                raise
            return Mirror(spec.name, None)
    def exec_module(self, module):
        pass

class Mirror(types.ModuleType):
    def __init__(self, name, real):
        super().__init__(name)
        self.__dict__.update(_real=real, __path__=[], __all__=list(getattr(real, "__all__", [])))
    def __getattr__(self, name):
        real = self.__dict__["_real"]
        if real is not None and hasattr(real, name):
            return getattr(real, name)
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "split_params_into_different_moe_groups_for_optimizer":
            return lambda groups: groups  # of a model without experts
        return make_stub(self.__name__ + "." + name)
    def __setattr__(self, name, value):
        real = self.__dict__.get("_real")
        if real is not None and not isinstance(value, Mirror) and not name.startswith("__"):
            setattr(real, name, value)
        super().__setattr__(name, value)

class Patch(importlib.abc.MetaPathFinder):
    # The tests give the number of their device to DistributedDataParallel and to torch.tensor, which the CPU has not.
    def find_spec(self, name, path=None, target=None):
        if name == "unit.common":
            from torch.nn.parallel import DistributedDataParallel as DDP
            before = DDP.__init__
            def init(self, module, device_ids=None, output_device=None, **others):
                before(self, module, **others)
            DDP.__init__ = init
            # What a helper of theirs calls beside what is tested: the wrapped optimizer, a file's name.
            import torch
            from dsjob.engine import Engine
            from torch.distributed.tensor import DTensor
            def on_whole(compare):  # their helpers compare parameters that are shards here
                whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t
                return lambda a, b, *args, **kwargs: compare(whole(a), whole(b), *args, **kwargs)
            torch.allclose, torch.equal = on_whole(torch.allclose), on_whole(torch.equal)
            torch.optim.Optimizer.optimizer = property(lambda self: self)
            Engine._get_optimizer_ckpt_name = lambda self, *args: ""
            from dsjob.deepspeed import get_accelerator
            if get_accelerator().device_name() == "cpu":
                get_accelerator().current_device = lambda: "cpu"
            sys.meta_path.remove(self)
        return None

sys.meta_path[:0] = [Shim(), Patch()]
multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "dsjob.deepspeed"])
"""

PLUGIN = """
import json, os

def pytest_collection_modifyitems(config, items):
    path = os.environ["REHOST_OUT"]
    done = {json.loads(line)["test"] for line in open(path)} if os.path.exists(path) else set()
    items[:] = [item for item in items if item.nodeid not in done]

def write(test, outcome, reason):
    with open(os.environ["REHOST_OUT"], "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\\n")

def pytest_runtest_logstart(nodeid, location):
    with open(os.environ["REHOST_OUT"] + ".now", "w") as file:
        file.write(nodeid)

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        text = ""
        if report.outcome == "skipped":
            text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
        write(report.nodeid, report.outcome, text.strip().splitlines()[0][:300] if text.strip() else "")
"""


def run_file(tests: Path, name: str, site: str, out: str, seconds: float) -> None:
    """Runs one file; a test that hangs ends pytest, which is then started again without it."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}:{tests}",
        "REHOST_OUT": out,
        "DS_UNITTEST_TIMEOUT": "60",
        "LOCAL_SIZE": "8",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rehost_plugin", "-p", "no:cacheprovider", f"unit/{name}"]
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        Path(out + ".now").unlink(missing_ok=True)
        try:
            result = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return
        if "Test hanged" not in result.stdout + result.stderr:
            if result.returncode not in (0, 1, 5):
                append(out, f"unit/{name}", "error", (result.stdout + result.stderr).strip().splitlines()[-1])
            return
        append(out, Path(out + ".now").read_text(), "failed", "ranks hung: one failed alone")


def append(out: str, test: str, outcome: str, reason: str) -> None:
    with open(out, "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def show(out: str) -> None:
    """A table: a line a file, and its most frequent reasons."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    last = {entry["test"]: entry for entry in map(json.loads, Path(out).read_text().splitlines())}
    for entry in last.values():
        file = entry["test"].partition("::")[0].removeprefix("unit/")
        counts[file][entry["outcome"]] += 1
        if entry["outcome"] != "passed":
            reasons[file][f"{entry['outcome']}: {entry['reason']}"] += 1
    print("| file | passed | failed | skipped |\n|---|---|---|---|")
    for file, count in counts.items():
        print(f"| {file} | {count['passed']} | {count['failed'] + count['error']} | {count['skipped']} |")
        for reason, number in reasons[file].most_common(12):
            print(f"    {number} x {reason}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSpeed's own unit tests against dsjob")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", default="results.jsonl")
    parser.add_argument("--seconds", type=float, default=600, help="for one file at most")
    given = parser.parse_args()
    tests, out = given.checkout / "tests", os.path.abspath(given.out)
    with tempfile.TemporaryDirectory() as site:
        Path(site, "sitecustomize.py").write_text(SITE)
        Path(site, "rehost_plugin.py").write_text(PLUGIN)
        for name in given.files:
            run_file(tests.resolve(), name, site, out, given.seconds)
    if os.path.exists(out):
        show(out)


if __name__ == "__main__":
    main()
