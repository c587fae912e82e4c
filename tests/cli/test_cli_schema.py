"""`dsjob schema`: JSON for editors, text for people, and what it says of a path that leads nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from job_documents import make_job
from jsonschema import Draft202012Validator

from dsjob.cli import main

ID = "https://dsjob.dev/schemas/1/view"


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["schema", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_whole_is_a_json_schema_that_checks_documents(schema: Any) -> None:
    code, out, err = schema()
    assert (code, err) == (0, "")
    published = json.loads(out)
    assert published["$id"] == f"{ID}/job.json"
    assert Draft202012Validator(published).is_valid(make_job())
    assert not Draft202012Validator(published).is_valid(make_job(trainer={"max_stps": 1}))


@pytest.mark.parametrize(
    ("view", "right", "wrong"),
    [
        ("job", {"model": {"_target_": "a.b"}, "data": {"train": {"_target_": "a.b"}}}, {"trainer": {"seed": "${x}"}}),
        ("recipe", {"defaults": ["base/gpt"], "trainer": {"seed": "${x}"}}, {"trainer": {"sed": "${x}"}}),
        ("deepspeed", {"train_batch_size": "auto"}, {"trainer": {"train_batch": 8}}),
    ],
)
def test_each_view_is_for_its_kind_of_document(schema: Any, view: str, right: Any, wrong: Any) -> None:
    published = Draft202012Validator(json.loads(schema("--view", view)[1]))
    assert published.is_valid(right)
    assert not published.is_valid(wrong)


def test_a_part_is_text_unless_json_is_asked_for(schema: Any) -> None:
    assert schema("zero_optimization.stage") == schema("zero_optimization.stage", "--format", "text")
    heading, *_, facts = schema("zero_optimization.stage")[1].partition("\n\n")
    assert heading.startswith("zero_optimization.stage\n  ")
    assert facts == (
        "  type          0, 1, 2, 3\n"
        "  default       0\n"
        "  status        implemented\n"
        "  in DeepSpeed  zero_optimization.stage\n"
    )
    published = json.loads(schema("zero_optimization.stage", "--format", "json")[1])
    assert published["$id"] == f"{ID}/job/zero_optimization/stage.json"
    assert [value for value in range(-2, 9) if Draft202012Validator(published).is_valid(value)] == [0, 1, 2, 3]


def test_the_whole_as_text_lists_the_sections(schema: Any) -> None:
    out = schema("--format", "text")[1]
    assert out.startswith("dsjob job document\n")
    assert "\n  trainer: object\n" in out


def test_an_argument_of_several_types_is_told_for_each(schema: Any) -> None:
    out = schema("optimizer.params.lr")[1]
    assert "optimizer.params.lr (Adam" in out
    assert "optimizer.params.lr (SGD)\n" in out
    published = json.loads(schema("optimizer.params.lr", "--format", "json")[1])
    Draft202012Validator.check_schema(published)
    assert [Draft202012Validator(published).is_valid(value) for value in (0.1, -1, "x")] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zero_optimization.stag"], 'did you mean "stage"?'),
        (["train_batch_size"], 'did you mean "trainer.train_batch"?'),
        (["--view", "deepspeed", "trainer"], "the deepspeed view has no key 'trainer'"),
    ],
)
def test_a_path_that_leads_nowhere_exits_2(schema: Any, arguments: list[str], said: str) -> None:
    code, out, err = schema(*arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("arguments", [["--view", "jobs"], ["--format", "yaml"], ["a", "b"]])
def test_wrong_flags_exit_2(arguments: list[str]) -> None:
    assert main(["schema", *arguments]) == 2
