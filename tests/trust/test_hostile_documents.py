"""Documents that try to run code, write files, start processes or open connections: none of them gets anywhere.

Every try is written into a job document, at a place of its own, and goes through validate, show and run in a process
with an audit hook, which counts what was attempted.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import ARGUMENTS, KNOWN, MARKER, MORE, PICKLE, TOUCH, WAYS_OUT
from job_documents import make_job, write_json
from jobs import clean_env, dsjob

WATCHED = Path(__file__).parents[1] / "support" / "watched.py"
MY_MODEL = """
import functools
import os
import subprocess
import torch
from os import system
from pathlib import Path
from subprocess import Popen, run
from torch import load, nn

bound = functools.partial(open, mode="w")

class Net(nn.Module):
    here = Path("pwned")
    start = staticmethod(subprocess.run)

def build():
    return Net()
"""


class Evil:
    """Makes the marker when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (TOUCH,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder with a model, a pickle, and modules that are links to other places."""
    job, outside = tmp_path / "job", tmp_path / "outside"
    for made in (job, outside, outside / "linked_pkg", job / "my_pkg", job / "remote", job / "data", job / "shadow"):
        made.mkdir()
    (job / "my_model.py").write_text(MY_MODEL)
    (job / "my_pkg" / "__init__.py").write_text("import os\n")
    (job / PICKLE).write_bytes(pickle.dumps(Evil()))
    (job / "remote" / "config.json").write_text(json.dumps({"model_type": "gpt2", "auto_map": {"AutoModel": "m.M"}}))
    (job / "remote" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    (job / "remote" / "m.py").write_text(f"open({MARKER!r}, 'w')")
    (job / "kernel").mkdir()
    (job / "kernel" / "config.json").write_text(json.dumps({"model_type": "gpt2", "_attn_implementation": "x/kernel"}))
    (job / "adapter").mkdir()
    (job / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    source = f"open({MARKER!r}, 'w')\ndef build(): ...\n"
    for path in ("linked.py", "linked_pkg/__init__.py", "shadowed.py"):
        (outside / path).write_text(source)
    (job / "linked.py").symlink_to(outside / "linked.py")
    (job / "linked_pkg").symlink_to(outside / "linked_pkg")
    (job / "my_pkg" / "linked.py").symlink_to(outside / "linked.py")
    (job / "shadow" / "shadowed.py").symlink_to(outside / "shadowed.py")
    return job


def watch(folder: Path, mode: str, *names: str) -> tuple[dict[str, Any], str]:
    """What a process did (see `watched`), and what it said."""
    done = subprocess.run(
        [sys.executable, "-P", str(WATCHED), mode, *names],
        cwd=folder,
        env=clean_env(PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1", XDG_CONFIG_HOME=str(folder)),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    said, _, told = done.stdout.strip().rpartition("\n")
    return json.loads(told), said + done.stderr


def count_tries(problems: str) -> set[int]:
    """The places, as numbers of callbacks, that a report names."""
    return {int(part.split(".")[0].split(":")[0]) for part in problems.split("callbacks.try")[1:]}


def make_document() -> dict[str, Any]:
    tries = [*KNOWN, *MORE, *ARGUMENTS]
    return make_job(
        model={"_target_": "my_model.build"},
        callbacks={f"try{number}": value for number, value in enumerate(tries)},
    )


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(KNOWN) == 26
    assert len(MORE) + len(ARGUMENTS) + len(WAYS_OUT) >= 100


def test_nothing_happens_in_validate_show_and_run(folder: Path) -> None:
    """All tries in one document: each is named, with its place, before anything is imported; nothing is attempted."""
    document = make_document()
    write_json(folder / "cfg.json", document)
    for mode, code in (("validate", 2), ("show", 0), ("run", 2)):
        found, said = watch(folder, mode, "cfg.json")
        assert found == {"codes": [code], "events": [], "imported": []}, (mode, said)
        if mode != "show":
            named = count_tries(said)
            assert {f"try{number}" for number in named} == set(document["callbacks"]), mode
            assert "\ncfg.json:" in said
    assert sorted(os.listdir(folder)) == sorted(
        {
            "cfg.json",
            "my_model.py",
            "my_pkg",
            PICKLE,
            "remote",
            "kernel",
            "adapter",
            "data",
            "shadow",
            "linked.py",
            "linked_pkg",
        }
    )


PLACES = ["model", "data.train", "data.eval", "data.collate", "loss", "optimizer", "scheduler"]


def test_nothing_happens_wherever_a_target_may_stand(folder: Path) -> None:
    """One document for each place, all in one process."""
    for where in PLACES:
        section, _, key = where.partition(".")
        document = make_job(model={"_target_": "my_model.build"})
        value = {"_target_": "os.system", "command": TOUCH}
        if key:
            document[section][key] = value
        else:
            document[section] = value
        write_json(folder / f"{where}.json", document)
    found, said = watch(folder, "run", *(f"{where}.json" for where in PLACES))
    assert found == {"codes": [2] * len(PLACES), "events": [], "imported": []}
    for where in PLACES:
        (told,) = [line for line in said.splitlines() if line.startswith(f"{where}.json:")]
        assert f"{where}._target_: os.system is not trusted" in told
        assert "run with --trust os.system" in told
    assert not (folder / MARKER).exists()


def test_there_is_no_way_out_of_a_trusted_module(folder: Path) -> None:
    """The second line: each try is refused where objects are made, also those that strings cannot tell."""
    tries = [*KNOWN, *MORE, *ARGUMENTS, *WAYS_OUT]
    write_json(folder / "tries.json", tries)
    found, said = watch(folder, "find", "tries.json")
    assert found["events"] == []
    lines = said.splitlines()
    told = dict.fromkeys(line.split("\t")[0] for line in lines if "\t" in line)
    assert set(told) == {value["_target_"] for value in tries}
    assert not (folder / MARKER).exists()


@pytest.mark.full("True")
@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_stops_at_a_way_out(folder: Path, fresh: bool) -> None:
    write_json(folder / "cfg.json", make_job(model={"_target_": "my_model.os.system", "command": TOUCH}))
    done = dsjob("run", "cfg.json", cwd=folder, fresh=fresh)
    assert done.returncode == 2, done.stderr
    assert "my_model.os.system is not trusted: my_model.os is the module os" in done.stderr
    assert "--trust my_model.os.system" in done.stderr
    assert not (folder / MARKER).exists()


@pytest.mark.parametrize("name", ["hydra", "defaults"])
def test_a_job_document_sets_nothing_of_hydras(folder: Path, name: str) -> None:
    evil = {"_target_": "os.system", "command": TOUCH}
    values = {
        "hydra": {"callbacks": {"x": evil}, "sweeper": evil, "launcher": evil},
        "defaults": [{"override hydra/launcher": "evil"}, "_self_"],
    }
    write_json(folder / "cfg.json", make_job(model={"_target_": "my_model.build"}) | {name: values[name]})
    for arguments in (["validate", "cfg.json"], ["show", "cfg.json"], ["cfg.json"], ["-m", "cfg.json", "name=a,b"]):
        done = dsjob(*arguments, cwd=folder)
        assert done.returncode == 2, arguments
        assert f"{name}: may not be set by a job document" in done.stderr
        assert "cfg.json:" in done.stderr
    assert not (folder / MARKER).exists()
