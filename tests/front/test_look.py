"""`dsjob.validate`, `dsjob.resolve` and `dsjob.plan`: as the commands, for Python programs."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from jobs import make_job

import dsjob
from dsjob import errors

DOCUMENT: dict[str, Any] = {
    "model": {"_target_": "my_model.build"},
    "data": {"train": {"_target_": "my_model.Data"}},
    "trainer": {"train_batch": 8, "max_steps": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_model", None)


def change(**sections: Any) -> dict[str, Any]:
    return copy.deepcopy({**DOCUMENT, **sections})


def test_all_problems_of_a_dict_are_told_without_lines_that_nobody_sees() -> None:
    problems = dsjob.validate(change(trainer={"train_batchh": 8}, optimizer={"type": "AdamV"}))
    assert {problem.dotted for problem in problems} == {"trainer", "trainer.train_batchh", "optimizer.type"}
    assert {(problem.source, problem.line) for problem in problems} == {("<dict>", 0)}
    assert "unknown key" in str(next(problem for problem in problems if problem.dotted == "trainer.train_batchh"))
    assert dsjob.validate(DOCUMENT) == []


def test_a_run_and_a_resolution_raise_the_same_problems(folder: Path) -> None:
    wrong = change(trainer={"train_batchh": 8})
    for function in (dsjob.resolve, dsjob.run):
        with pytest.raises(errors.DocumentError) as caught:
            function(wrong)
        assert list(caught.value.problems) == dsjob.validate(wrong)
    assert sorted(path.name for path in folder.iterdir()) == ["cfg.json", "my_model.py"]  # and nothing was begun


def test_a_file_with_overrides_and_a_recipe_are_validated(folder: Path) -> None:
    (folder / "wrong.json").write_text((folder / "cfg.json").read_text().replace("max_steps", "max_stepz"))
    (problem,) = [each for each in dsjob.validate(folder / "wrong.json") if each.rule == "unknown-key"]
    assert problem.place.startswith(f"{folder}/wrong.json:")
    assert problem.line > 1
    (problem,) = dsjob.validate("cfg.json", overrides=["trainer.seed=no"])
    assert problem.dotted == "trainer.seed"
    assert dsjob.validate(recipe="quickstart") == []
    assert [each.dotted for each in dsjob.validate(recipe="quickstart", overrides=["trainer.seed=no"])] == [
        "trainer.seed"
    ]
    (problem,) = dsjob.validate(recipe="quickstar")
    assert "quickstart" in problem.hint


def test_a_deep_look_imports_what_is_trusted_and_checks_its_arguments() -> None:
    (problem,) = dsjob.validate(change(model={"_target_": "my_model.build", "dropot": 0.1}), deep=True)
    assert problem.path == ("model", "dropot")
    assert "dropout" in problem.hint


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "a document holds texts, numbers, lists and dicts, not object"),
        (dsjob.Problem, "not dsjob.errors.Problem"),
        (float("nan"), "nan is not a JSON number"),
        ({1: 2}, "the key 1 is not a text"),
    ],
)
def test_what_a_document_cannot_hold_is_told_with_its_place(value: Any, told: str) -> None:
    (problem,) = dsjob.validate(change(model={"_target_": "my_model.build", "dropout": [value]}))
    assert problem.path == ("model", "dropout", 0)
    assert told in problem.message


def test_paths_and_tuples_are_taken_for_texts_and_lists(tmp_path: Path) -> None:
    resolved = dsjob.resolve(change(output={"dir": tmp_path}, model={"_target_": "my_model.build", "sizes": (1, 2)}))
    assert resolved["output"]["dir"] == str(tmp_path)
    assert resolved["model"]["sizes"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "no document was given"),
        ({"document": DOCUMENT, "overrides": "a=b"}, "overrides are a list of texts"),
        ({"document": DOCUMENT, "trust": "my_model"}, "trust is a list of names"),
    ],
)
def test_a_wrong_call_says_what_to_write(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(errors.UsageError, match=told) as caught:
        dsjob.plan(**arguments)
    assert caught.value.hint


def test_a_resolved_document_is_complete_and_the_dict_is_not_changed() -> None:
    given = change()
    resolved = dsjob.resolve(given, overrides=["trainer.max_steps=9"], world_size=2)
    assert given == DOCUMENT
    assert (resolved["trainer"]["max_steps"], resolved["trainer"]["micro_batch"]) == (9, 4)
    assert dsjob.validate(resolved) == []
    assert json.loads(json.dumps(resolved)) == resolved


def test_a_plan_says_whether_the_job_fits() -> None:
    small = dsjob.plan(DOCUMENT, device_memory="80GiB")
    assert small.fits
    assert sum(math.prod(weight.shape) for weight in small.job.model.weights) == 569
    large = dsjob.plan({"zero_optimization": {"stage": 3}}, params=70_000_000_000, world_size=2, device_memory=80 << 30)
    assert not large.fits
    assert repr(large).startswith("Plan(job, 2 ranks, ")
    assert repr(large).endswith(" GiB per rank, does not fit in 80 GiB)")
    with pytest.raises(errors.UsageError, match="not an amount of memory"):
        dsjob.plan(DOCUMENT, device_memory=80)


def test_a_programs_own_hydra_goes_on(folder: Path) -> None:
    (folder / "own.yaml").write_text("x: 1")
    stored = dict(ConfigStore.instance().repo)
    with initialize_config_dir(str(folder), version_base=None):
        dsjob.resolve(DOCUMENT)
        assert compose("own").x == 1
    assert ConfigStore.instance().repo == stored


def test_threads_may_look_at_documents_at_the_same_time() -> None:
    found: list[int] = []

    def look(steps: int) -> None:
        found.append(dsjob.resolve(DOCUMENT, overrides=[f"trainer.max_steps={steps}"])["trainer"]["max_steps"])

    threads = [threading.Thread(target=look, args=(steps,)) for steps in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 9))


def test_looking_at_a_document_imports_no_torch(folder: Path) -> None:
    program = (
        "import sys, dsjob\ndsjob.validate('cfg.json')\ndsjob.resolve('cfg.json')\n"
        "dsjob.errors, dsjob.Problem, dsjob.Result\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dsjob.plan(DOCUMENT, world_size="2"), "world_size='2' is not a number of ranks"),
        (lambda: dsjob.plan(DOCUMENT, world_size=0), "world_size=0 is not a number of ranks"),
        (lambda: dsjob.plan(DOCUMENT, params=-7), "'-7' is not a number of parameters"),
        (lambda: dsjob.validate(DOCUMENT, overrides=[3]), r'a list of "key=value" texts, not \[3\]'),
        (lambda: dsjob.validate(7), "a document is a path, a URL or a dict, not 7"),
        (lambda: dsjob.run(DOCUMENT, overrides={"a.b": 2}), r"overrides=\['a\.b=2'\]"),
        (lambda: dsjob.run([1]), r"a document is a path, a URL or a dict, not \[1\]"),
        (lambda: dsjob.load_model(None), "a checkpoint is a path or a URL, not None"),
        (lambda: dsjob.convert(None), "a checkpoint is a path or a URL, not None"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told_in_plain_words(call: Any, message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        call()


def test_a_number_of_parameters_may_be_written_as_on_the_command_line() -> None:
    assert dsjob.plan(DOCUMENT, params="7B").job.model == dsjob.plan(DOCUMENT, params=7_000_000_000).job.model
