"""Escapes in every string of a document, in names of files, and in what a user's code says: no command passes one
on."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import MODULE, dsjob, make_job
from programs import DSJOB, clean_env, run_program
from test_terminal import is_raw

from dsjob.cli import main

FORGED = "dsjob: error: forged"
EVIL = f"x\x1b[31m\r\x9b2J\u202e\x07\n{FORGED}"
NAMED = "x\x1b[31m\r\x9b2J\u202e\x07"  # where a newline is refused
TARGETS = ("_target_", "type")

RUNNING: dict[str, Any] = {
    "name": "evil",
    "model": {"_target_": "evil.Net", "text": EVIL},
    "data": {"train": {"_target_": "my_model.Data"}, "eval": {"_target_": "my_model.Data", "n": 8}},
    "trainer": {"train_batch": 8, "max_steps": 2, "log_every": 1, "step": {"_target_": "evil.step"}},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "metrics": {EVIL: {"_target_": "evil.measure"}},
    "callbacks": {EVIL: {"_target_": "evil.Talk", "text": EVIL}},
    "checkpoint": {"every": 1},
    "output": {"dir": f"runs/{EVIL}"},
}
EVIL_MODULE = f"""
import my_model, torch, warnings
from dsjob import Callback

EVIL = {EVIL!r}

class Net(my_model.Net):
    def __init__(self, text, fails=False):
        super().__init__()
        self.fails = fails
        self.add_module(EVIL, torch.nn.Linear(1, 1))
        warnings.warn("a warning of a library: " + text)

    def forward(self, x, y):
        if self.fails:
            raise ValueError(EVIL)
        return super().forward(x, y)

def step(engines, batch, **_):
    engine = engines.first if hasattr(engines, "first") else engines
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return {{"loss": loss, EVIL: 0.5}}

def measure(outputs, batch):
    return torch.tensor(0.5)

class Talk(Callback):
    def __init__(self, text):
        self.text = text

    def on_start(self, run):
        run.say(self.text, self.text)
        run.say("several lines", self.text + "\\n" + self.text)

def fail():
    raise RuntimeError(EVIL)
"""


def check(*outputs: str) -> None:
    """No output has a raw control character, or a line that a name has forged."""
    for output in outputs:
        found = {ascii(c) for c in output.replace("\n", "").replace("\t", "") if is_raw(c)}
        assert not found, (found, ascii(output))
        assert not re.search(f"^{FORGED}", output, re.MULTILINE), output


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = dsjob(*words, cwd=folder, **env)
    check(done.stdout, done.stderr)
    return done


def list_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Each text in a document, and each key (True)."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(key, str):
            yield (*path, key), True
        if isinstance(item, str):
            yield (*path, key), False
        yield from list_places(item, (*path, key))


def spoil(document: dict[str, Any], path: tuple[Any, ...], *, key: bool) -> dict[str, Any]:
    made = copy.deepcopy(document)
    above: Any = made
    for part in path[:-1]:
        above = above[part]
    if key:
        above[path[-1] + EVIL] = above.pop(path[-1])
    else:
        above[path[-1]] += EVIL
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_job(tmp_path)
    (tmp_path / "my_model.py").write_text(MODULE)
    (tmp_path / "evil.py").write_text(EVIL_MODULE)
    (tmp_path / "evil.json").write_text(json.dumps(RUNNING))
    return tmp_path


DOCUMENT = {
    **copy.deepcopy(RUNNING),
    "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "scheduler": {"type": "WarmupLR"}},
    "predict": {"outputs": {"a": "outputs.logits"}, "dir": "s3://bucket/x", "format": "npz"},
    "monitor": {
        "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "j"},
        "wandb": {"enabled": True, "project": "p"},
    },
    "losses": {"a": {"_target_": "a.b", "text": "t"}},
    "tasks": ["train", "eval"],
    "launch": {"device": "cpu", "include": "localhost:0"},
    "resolved": {"file": "x"},
}
PLACES = list(list_places(DOCUMENT))


@pytest.mark.parametrize(
    ("kind", "step"),
    [("text", 5), ("json", 9), ("github", 9), ("sarif", 9), pytest.param("text", 1, marks=pytest.mark.full)],
)
def test_no_check_of_a_document_passes_an_escape_on(
    kind: str, step: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for path, key in PLACES[::step]:
        document = spoil(DOCUMENT, path, key=key)
        Path("spoilt.json").write_text(json.dumps(document))
        main(["validate", "--format", kind, "spoilt.json"])
        if kind == "text":
            main(["show", "spoilt.json"])
        check(*capfd.readouterr())


@pytest.mark.parametrize("suffix", ["json", pytest.param("yaml", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "words",
    [
        ["validate", "--deep"],
        ["show", "--origins"],
        ["show", "--changed", "--format", "json"],
        ["show", "--diff", "evil.json"],
        ["plan"],
        ["run", "--cfg", "job"],
        ["run", "--cfg", "hydra"],
        ["run", "--info", "all"],
        ["run", "--smoke-only"],
        ["import"],
        ["eval"],
        ["runs"],
        ["report"],
        ["ckpt", "ls"],
        ["ckpt", "info"],
        ["ckpt", "verify"],
        ["ckpt", "gc"],
        ["convert"],
        ["generate", "--prompt", NAMED],
        ["init"],
        ["exec"],
        ["schema"],
        ["ops", "build"],
        ["predict"],
        ["compare-engines"],
        [],
    ],
    ids=" ".join,
)
def test_no_command_passes_on_the_name_of_a_file(words: list[str], suffix: str, folder: Path) -> None:
    """With a document in the file, and with nothing there."""
    name = f"{EVIL}.{suffix}".replace("/", "")
    if suffix == "json":
        (folder / name).write_text(json.dumps(RUNNING))
    run(folder, *words, name)


def test_no_command_passes_on_a_flag_or_an_override(folder: Path) -> None:
    for word in (f"--{EVIL}", f"name={EVIL}", f"+{EVIL}=1", f"~{EVIL}", f"trainer.{EVIL}=2", EVIL):
        for command in ("run", "validate", "ckpt", "plan"):
            run(folder, command, "cfg.json", word)
    run(folder, EVIL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose names are all evil."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my_model.py").write_text(MODULE)
    (folder / "evil.py").write_text(EVIL_MODULE)
    (folder / "evil.json").write_text(json.dumps(RUNNING))
    done = run(folder, "evil.json")
    assert done.returncode == 0, done.stderr
    assert "\\x1b[31m" in done.stdout
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "runs"],
        ["runs", "diff", "RUN", "RUN"],
        ["ckpt", "ls", "RUN"],
        ["ckpt", "info", "RUN", "--tensors"],
        ["ckpt", "verify", "RUN"],
        ["ckpt", "diff", "RUN", "--tag", "step-00000001", "--tag", "step-00000002"],
        ["ckpt", "gc", "RUN", "--dry-run"],
        ["ckpt", "copy", "RUN", f"copied {NAMED}"],
        ["convert", "RUN", f"weights {NAMED}"],
        ["report", "RUN", "-o", f"report {NAMED}.html"],
        ["eval", "RUN"],
        ["predict", "RUN"],
        ["generate", "RUN", "--prompt", EVIL],
        ["run", "RUN"],
        ["run", "RUN", "trainer.max_steps=3", "launch.nproc=2"],
        ["run", "RUN", "--quiet", "trainer.max_steps=4"],
        ["run", "RUN", "--json", "trainer.max_steps=5"],
        ["show", "RUN"],
        ["plan", "RUN"],
    ],
    ids=lambda words: " ".join(word for word in words if word.isprintable()),
)
def test_no_command_passes_on_names_of_a_run(words: list[str], trained: Path) -> None:
    run(trained, *(f"runs/{EVIL}" if word == "RUN" else word for word in words))


def test_the_standalone_converter_passes_nothing_on(trained: Path) -> None:
    script = next((trained / "runs").rglob("zero_to_fp32.py"))
    words = [sys.executable, str(script), str(script.parent), f"out {NAMED}"]
    done = run_program(words, cwd=trained, env=clean_env())
    assert done.returncode == 0, done.stderr
    check(done.stdout, done.stderr)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("flag", [[], ["--debug"]], ids=["plain", "debug"])
def test_no_exception_of_a_rank_is_passed_on_raw(folder: Path, nproc: int, flag: list[str]) -> None:
    words = ["++model.fails=true", f"launch.nproc={nproc}", "output.dir=run", "trainer.step=null"]
    done = run(folder, "evil.json", *words, *flag)
    assert done.returncode == 1
    assert "ValueError: x\\x1b[31m" in done.stderr
    for text in (folder / "run").rglob("*.txt"):
        check(text.read_text())


def test_no_exception_of_a_program_is_passed_on_raw(folder: Path) -> None:
    (folder / f"{NAMED}.py").write_text("import evil\nevil.fail()\n")
    done = run(folder, "exec", "--run-dir", f"run {NAMED}", "--num_gpus", "2", f"{NAMED}.py", PYTHONPATH=str(folder))
    assert done.returncode == 1
    assert "RuntimeError: x\\x1b[31m" in done.stderr


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_columns_of_data_are_not_passed_on_raw(folder: Path, kind: str) -> None:
    text = f'"{EVIL}","b"\n1,2\n' if kind == "csv" else json.dumps({EVIL: 1})
    (folder / f"{NAMED}.{kind}").write_text(text)
    source = {"_target_": "dsjob.text.Text", "source": f"{NAMED}.{kind}"}
    (folder / "text.json").write_text(json.dumps({**RUNNING, "data": {**RUNNING["data"], "train": source}}))
    done = run(folder, "text.json", XDG_CACHE_HOME=str(folder / "cache"))
    assert done.returncode == 1
    assert "has no column 'text'" in done.stderr


def test_a_sweep_passes_nothing_on(folder: Path) -> None:
    done = run(folder, "-m", "evil.json", "trainer.max_steps=1,2", "++model.fails=false,true")
    assert "sweep" in done.stdout
    assert "failed" in done.stdout


def test_ranks_of_torchrun_pass_nothing_on(folder: Path) -> None:
    """Under torchrun, each rank prints for itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "evil.json"]
    done = run_program([*command, "++model.fails=true", "trainer.step=null"], cwd=folder, timeout=120)
    check(*(re.sub(r"(?m)^.*torch/distributed.*$", "", text) for text in (done.stdout, done.stderr)))
