"""A composed document, and the places that its values come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json

from dsjob import document as documents
from dsjob.document.origins import Composed, is_deepspeed, read_document, settle
from dsjob.errors import DocumentError, UsageError

TEXT = """\
trainer:
  micro_batch: 4
  max_steps: 10
data:
  files:
    - a
    - b
"""


@pytest.fixture
def file() -> documents.Document:
    return documents.parse(TEXT, "job.yaml")


def place(composed: Composed, path: str) -> str:
    parts = (int(part) if part.isdigit() else part for part in path.split(".") if part)
    source, line, column = composed.locate(tuple(parts))
    return f"{source}:{line}:{column}" if line else source


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("trainer.max_steps", "job.yaml:3:3"),
        ("data.files.1", "job.yaml:7:7"),
        ("trainer.seed", "job.yaml:1:1"),
        ("model._target_", "job.yaml:1:1"),
        ("", "job.yaml:1:1"),
    ],
)
def test_a_value_of_a_file_is_found_at_its_key_or_the_nearest_that_there_is(
    file: documents.Document, path: str, found: str
) -> None:
    assert place(Composed({}, file), path) == found


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("trainer.max_steps", "job.yaml:3:3"),
        ("trainer.seed", "recipe quickstart"),
        ("model.width", "recipe quickstart"),
        ("", "job.yaml:1:1"),
    ],
)
def test_what_a_file_beside_a_recipe_does_not_have_is_the_recipes(
    file: documents.Document, path: str, found: str
) -> None:
    assert place(Composed({}, file, ("quickstart",)), path) == found


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("trainer.max_steps", "command line: trainer.max_steps=5"),
        ("trainer.micro_batch", "job.yaml:2:3"),
        ("optimizer.params.lr", "command line: optimizer=sgd"),
        ("optimizer", "command line: optimizer=sgd"),
    ],
)
def test_an_override_comes_first_and_covers_what_is_below_it(file: documents.Document, path: str, found: str) -> None:
    overrides = {("trainer", "max_steps"): "trainer.max_steps=5", ("optimizer",): "optimizer=sgd"}
    assert place(Composed({}, file, ("quickstart",), overrides), path) == found


@pytest.mark.parametrize(
    ("recipes", "found"), [((), "command line"), (("quickstart",), "recipe quickstart"), (("a", "b"), "recipe a, b")]
)
def test_without_a_file_it_is_the_recipe_or_the_command_line(recipes: tuple[str, ...], found: str) -> None:
    assert place(Composed({}, None, recipes), "trainer.seed") == found


def test_values_of_the_deepspeed_file_are_found_in_it(file: documents.Document) -> None:
    deepspeed = documents.parse('{"zero_optimization":\n {"stage": 2}}', "ds.json")
    composed = Composed({}, file, deepspeed=deepspeed)
    assert place(composed, "deepspeed.zero_optimization.stage") == "ds.json:2:3"
    assert place(composed, "deepspeed.gradient_clipping") == "ds.json:1:1"
    assert place(composed, "deepspeed") == "job.yaml:1:1"
    assert place(composed, "trainer.max_steps") == "job.yaml:3:3"


def test_nulls_and_empty_sections_are_dropped() -> None:
    composed = settle({**make_job(), "loss": None, "scheduler": {"type": None, "params": {}}, "metrics": {}})
    assert composed.document == make_job()


@pytest.mark.parametrize(
    ("source", "recipes", "name"),
    [
        ("some/where/my job.v2.yaml", (), "my-job.v2"),
        ("_private.json", (), "private"),
        ("-.yaml", (), "job"),
        ("...", (), "job"),
        ("memory://jobs/one.json", (), "one"),
        ("job.yaml", ("base/gpt",), "base-gpt"),
        (None, ("quickstart", "other"), "quickstart"),
        (None, (), "job"),
    ],
)
def test_a_job_without_a_name_gets_a_valid_one(source: str | None, recipes: tuple[str, ...], name: str) -> None:
    file = documents.parse(TEXT, source, format="yaml") if source else None
    assert settle({}, file=file, recipes=recipes).document["name"] == name


def test_a_name_that_is_given_stays() -> None:
    assert settle({"name": "mine"}, recipes=("quickstart",)).document["name"] == "mine"


def settle_file(path: Path, **kwargs: Any) -> Composed:
    file = read_document(str(path))
    return settle(file.value, file=file, **kwargs)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a DeepSpeed config, `jobs`, below the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "jobs"
    folder.mkdir()
    write_json(folder / "ds.json", {"gradient_clipping": 1, "optimizer": None, "bf16": {}})
    write_json(tmp_path / "ds.json", {"gradient_clipping": 2})
    return folder


def test_the_deepspeed_file_is_read_relative_to_the_job_file(elsewhere: Path) -> None:
    composed = settle_file(write_json(elsewhere / "job.json", {"deepspeed": "ds.json"}))
    assert composed.document["deepspeed"] == {"gradient_clipping": 1}
    assert composed.deepspeed is not None
    assert composed.deepspeed.source == str(elsewhere / "ds.json")


def test_a_deepspeed_file_named_on_the_command_line_is_relative_to_the_current_folder(elsewhere: Path) -> None:
    job = write_json(elsewhere / "job.json", {"deepspeed": "other.json"})
    file = read_document(str(job))
    overrides = {("deepspeed",): "deepspeed=ds.json"}
    composed = settle({"deepspeed": "ds.json"}, file=file, overrides=overrides)
    assert composed.document["deepspeed"] == {"gradient_clipping": 2}
    assert settle({"deepspeed": "ds.json"}).document["deepspeed"] == {"gradient_clipping": 2}


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_an_absolute_deepspeed_file_is_taken_as_it_is(elsewhere: Path, prefix: str) -> None:
    job = write_json(elsewhere / "job.json", {"deepspeed": f"{prefix}{elsewhere.parent / 'ds.json'}"})
    assert settle_file(job).document["deepspeed"] == {"gradient_clipping": 2}


def test_a_deepspeed_file_that_is_missing_is_named_with_its_path(elsewhere: Path) -> None:
    job = write_json(elsewhere / "job.json", {"deepspeed": "gone.json"})
    with pytest.raises(DocumentError, match=f"cannot read {elsewhere}/gone.json: no such file") as caught:
        settle_file(job)
    (problem,) = caught.value.problems
    assert (problem.source, problem.line, problem.dotted) == (str(job), 2, "deepspeed")


def test_a_deepspeed_section_in_the_job_itself_has_no_file() -> None:
    composed = settle({"deepspeed": {"gradient_clipping": None, "bf16": {"enabled": True}}})
    assert composed.deepspeed is None
    assert composed.document["deepspeed"] == {"bf16": {"enabled": True}}


def test_read_document_names_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_document(str(tmp_path / "gone.json"))
    (tmp_path / "bad.json").write_text('{"a": }')
    with pytest.raises(DocumentError) as caught:
        read_document(str(tmp_path / "bad.json"))
    assert caught.value.problems[0].place == f"{tmp_path}/bad.json:1:7"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"train_batch_size": 8}, True),
        ({"zero_optimization": {"stage": 2}}, True),
        ({"train_batch_size": 8, "unknown": 1}, True),
        ({"trainer": {"micro_batch": 8}, "train_batch_size": 8}, False),
        (make_job(), False),
        ({"model": {"_target_": "a.b"}}, False),
        ({"zero_optimization": {"stage": 2}, "model": {}}, False),
        ({"unknown": 1}, False),
        ({}, False),
    ],
)
def test_a_bare_deepspeed_config_is_told_from_a_job(document: dict[str, Any], expected: bool) -> None:
    assert is_deepspeed(json.loads(json.dumps(document))) == expected
