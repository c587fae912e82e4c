"""What documents may read of the environment, and that nothing of it leaves the process."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from job_documents import compose_file, make_job, write_json

from dsjob.contract import masking
from dsjob.contract.environment import Reference, hide_values, parse_reference
from dsjob.contract.masked_output import watch_output
from dsjob.contract.masking import mask, mask_texts
from dsjob.contract.secrets import is_reference
from dsjob.errors import DocumentError, Problem
from dsjob.trust.grant import Trust, check_document

CANARY = "hunter2 canary/+ü\"'"
HERE = "${oc.env:DSJOB_CANARY}"

# The same variable in every spelling of OmegaConf's grammar; `{}` in the second kind may be any of the first.
SPELLINGS = (
    HERE,
    "${oc.env:'DSJOB_CANARY'}",
    '${oc.env:"DSJOB_CANARY"}',
    "${ oc.env : DSJOB_CANARY }",
    "${oc.env:DSJOB_CANARY,null}",
    "${oc.env:DSJOB_CANARY,x}",
    "${oc.env:DSJOB_NOT_SET,${oc.env:DSJOB_CANARY}}",
    "${oc.env:DSJOB_CANARY,${oc.env:DSJOB_OTHER}}",
    "${oc.env:DSJOB_NOTHING,${oc.env:DSJOB_CANARY}}",
    "${oc.select:not.there,${oc.env:DSJOB_CANARY}}",
    "${oc.select:tags.hidden}",
    "${oc.select:'tags[hidden]'}",
    "${tags.hidden}",
    "${.tags.hidden}",
    "${tags[hidden]}",
    "${tags.${tags.part}}",
    "${tags.again}",
    "${oc.${tags.resolver}:DSJOB_CANARY}",
    "${oc.env:${tags.variable}}",
    "${oc.env:DSJOB_${tags.suffix}}",
    "${oc.decode:${oc.env:DSJOB_CANARY}}",
    "${oc.decode:${tags.escaped}}",
    "${oc.decode:'\\${oc.env:DSJOB_CANARY}'}",
    "${oc.deprecated:tags.hidden}",
    "${oc.env:${oc.decode:DSJOB_CANARY}}",
)
INSIDE = (
    "http://127.0.0.1:9/{}",
    "{}{}",
    "x ${{oc.decode:'{}'}}",
    "${{oc.decode:'[{}, 1]'}}",
    "${{oc.create:{{a: {}}}}}",
    "${{oc.create:[{}]}}",
    "${{oc.dict.values:tags.section}}",
    "${{tags.{}}}",
    "${{{}}}",
    "${{{}:a}}",
    "${{now:{}}}",
    "${{tags.section}}",
    "text of ${{tags.section.a}}",
)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSJOB_CANARY", CANARY)
    monkeypatch.setenv("DSJOB_OTHER", "another-canary")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(masking, "_spellings", set())
    monkeypatch.setattr(masking, "_mask", None)


def make_tagged(**sections: Any) -> dict[str, Any]:
    """A job whose callback has the tags that interpolations above refer to (`tags` is an argument of a target)."""
    tags = {
        "hidden": HERE,
        "part": "hidden",
        "again": "${.hidden}",
        "resolver": "env",
        "variable": "DSJOB_CANARY",
        "suffix": "CANARY",
        "escaped": "\\${oc.env:DSJOB_CANARY}",
        "section": {"a": HERE},
    }
    return make_job(callbacks={"tag": {"_target_": "mine.Tag", "tags": tags}}, **sections)


def compose_text(document: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    # `tags` stands at a place with a short name in the texts above.
    text = json.dumps(document, indent=1)
    text = text.replace("'tags[", "'callbacks.tag.tags[")
    for short in ("tags.", "tags["):
        text = text.replace("${" + short, "${callbacks.tag." + short).replace(":" + short, ":callbacks.tag." + short)
    Path("job.json").write_text(text.replace("${.tags", "${callbacks.tag.tags"))
    return compose_file(Path("job.json"), **kwargs).document


def refuse(document: dict[str, Any], **kwargs: Any) -> tuple[Problem, ...]:
    with pytest.raises(DocumentError) as caught:
        compose_text(document, **kwargs)
    problems = caught.value.problems
    told = "".join(map(str, problems))
    assert "hunter2" not in told
    assert "another-canary" not in told
    return problems


def test_nothing_but_an_argument_is_read_from_the_environment() -> None:
    here = {
        "name": HERE,
        "output": {"dir": HERE},
        "checkpoint": {"dir": HERE, "resume": HERE},
        "trainer": {"micro_batch": 4, "max_steps": HERE},
        "optimizer": {"type": HERE, "params": {"lr": HERE}},
        "deepspeed": HERE,
        "launch": {"backend": HERE},
        "model": {"_target_": HERE, "inner": [{"_target_": HERE, "_partial_": HERE, "_args_": HERE}]},
        "metrics": {"a": {"_target_": HERE}},
    }
    problems = refuse(make_job(**here))
    assert {found.rule for found in problems} == {"environment"}
    assert all(found.source == "job.json" and found.line and found.column for found in problems)
    assert {found.dotted for found in problems} == {
        *("name", "output.dir", "checkpoint.dir", "checkpoint.resume", "trainer.max_steps", "optimizer.type"),
        *("optimizer.params.lr", "deepspeed", "launch.backend", "model._target_", "metrics.a._target_"),
        *("model.inner[0]._target_", "model.inner[0]._partial_", "model.inner[0]._args_"),
    }


def test_every_spelling_is_recognised() -> None:
    """One after the other below `optimizer.params`, where none may stand."""
    given = {f"p{number}": text for number, text in enumerate(SPELLINGS)}
    problems = refuse(make_tagged(optimizer={"type": "AdamW", "params": given}))
    assert {found.dotted for found in problems} == {f"optimizer.params.{key}" for key in given}
    for found in problems:
        assert found.rule == "environment", found
        assert "DSJOB_" in found.message + found.hint


@pytest.mark.parametrize("text", [*INSIDE])
def test_no_other_text_and_no_structure_may_hold_a_value(text: str) -> None:
    """As a part of an argument it could be sent to a host that the document names."""
    given = {f"p{number}": text.format(spelling, spelling) for number, spelling in enumerate(SPELLINGS[:8])}
    carried = "oc.create" in text or "section}}" in text or "values" in text
    problems = refuse(make_tagged(model={"_target_": "a.b", **given}, optimizer={"type": "SGD", "params": given}))
    for key in given:
        places = [found.dotted for found in problems if key in found.path]
        assert any(place.startswith("optimizer") for place in places), key
        assert carried or any(place.startswith("model") for place in places), key
    assert {found.rule for found in problems} <= {"environment", "interpolation"}


def test_an_argument_that_is_one_variable_stays_a_reference() -> None:
    given = {f"p{number}": text for number, text in enumerate(SPELLINGS) if "decode:$" not in text}
    model = compose_text(make_tagged(model={"_target_": "mine.build", **given, "deep": [{"a": HERE}]}))["model"]
    assert model["deep"] == [{"a": HERE}]
    for key, text in given.items():
        assert (found := parse_reference(model[key])), text
        assert "DSJOB_CANARY" in found.names


def test_what_anybody_may_see_is_read_anywhere() -> None:
    text = "runs/${oc.env:USER}/${oc.env:SLURM_JOB_ID,0}"
    document = make_job(name="${oc.env:USER}", output={"dir": text}, model={"_target_": "mine.build", "path": text})
    composed = compose_text(document)
    assert composed["name"] == "somebody"
    assert composed["output"]["dir"] == composed["model"]["path"] == "runs/somebody/0"


def test_a_part_of_an_argument_is_told_from_a_value_of_the_job() -> None:
    first, second = refuse(make_job(name=HERE, model={"_target_": "mine.build", "url": f"http://h/{HERE}"}))
    assert second.hint == "put all of it in one variable: ${oc.env:DSJOB_CANARY}"
    assert first.hint.startswith("keep credentials in the storage library's own configuration or environment, or ")
    assert "write the value" not in first.hint


def test_the_users_own_list_adds_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_SEEN", "7")
    document = make_job(trainer={"micro_batch": "${oc.decode:${oc.env:DSJOB_SEEN}}", "max_steps": 1})
    (found,) = refuse(document)
    assert found.hint.endswith("allow it with `environment: [DSJOB_SEEN]` in ~/.config/dsjob/config.yaml")
    assert compose_text(document, environment=["DSJOB_SEEN"])["trainer"]["micro_batch"] == 7


def test_a_reference_survives_being_composed_again() -> None:
    texts = {"a": "${oc.env:A}", "b": "${oc.env:A, null}", "c": "${oc.env:A,${oc.env:B,'x y'}}", "d": "${oc.env:A,/b}"}
    once = compose_text(make_job(model={"_target_": "mine.build", **texts}))["model"]
    assert compose_text(make_job(model=once))["model"] == once
    assert list(once.values())[1:] == [
        "${oc.env:A}",
        "${oc.env:A,null}",
        "${oc.env:A,${oc.env:B,'x y'}}",
        "${oc.env:A,'/b'}",
    ]


def test_a_default_that_is_no_plain_text_is_refused() -> None:
    texts = ["'a$b'", '"a\'b"', '"{}"', "'a\\b'", "{a: 1}"]
    given = {f"p{number}": f"${{oc.env:DSJOB_NOT_SET,{default}}}" for number, default in enumerate(texts)}
    problems = refuse(make_job(model={"_target_": "mine.build", **given}))
    assert [(found.dotted, found.rule) for found in problems] == [(f"model.{key}", "environment") for key in given]


# ---- constructors of the list


def check(arguments: dict[str, Any], target: str = "datasets.load_dataset") -> list[str]:
    document = {"data": {"train": {"_target_": target, "path": "json", **arguments}}}
    return [found.dotted for found in check_document(document, Trust()) if found.rule == "environment"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"data_files": HERE},
        {"data_dir": HERE, "data_files": "http://127.0.0.1:9/"},
        {"storage_options": {"headers": {"token": HERE}}},
        {"_args_": [HERE]},
        {"token": HERE, "data_files": "https://huggingface.co.evil.example/x"},
        {"token": HERE, "storage_options": {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}},
    ],
)
def test_a_listed_constructor_gets_no_value_that_it_could_send_away(arguments: dict[str, Any]) -> None:
    assert check(arguments)


def test_a_listed_constructor_gets_a_token(tmp_path: Path) -> None:
    assert check({"token": HERE}) == []
    inner = {"_target_": "transformers.AutoTokenizer.from_pretrained", "token": HERE}
    assert check({"tokenizer": inner, "data_files": "http://127.0.0.1:9"}) == []
    assert check({"tokenizer": {**inner, "cache_dir": HERE}}) == ["data.train.tokenizer.cache_dir"]


def test_a_function_of_the_users_own_gets_any_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_env.py").write_text("")
    document = {"model": {"_target_": "mine_env.build", "a": HERE, "b": ["http://h/"]}}
    assert check_document(document, Trust(folders=(str(tmp_path),))) == []
    assert check_document({"model": {"_target_": "vendor.build", "a": HERE}}, Trust(prefixes=("vendor",))) == []
    elsewhere = check_document(document, Trust(folders=(str(tmp_path),), local=False))
    assert {found.rule for found in elsewhere} == {"untrusted-target", "environment"}


# ---- references


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("${oc.env:A}", Reference("A")),
        ("${oc.env: A , null }", Reference("A", True)),
        ("${oc.env:A,b c}", Reference("A", True, "b c")),
        ("${oc.env:A,'null'}", Reference("A", True, "null")),
        ("${oc.env:A,${oc.env:B}}", Reference("A", True, Reference("B"))),
        ("${oc.env:A}x", None),
        ("${oc.env:A,${oc.env:B}", None),
        ("${oc.env:A,'}", None),
        ("${oc.env:A," * 5000, None),
        ("${oc.env:A," * 11 + "a" + "}" * 11, None),
        ("${oc.env:}", None),
        (5, None),
    ],
)
def test_references_are_read(text: object, reference: Reference | None) -> None:
    assert parse_reference(text) == reference
    if reference is not None:
        assert parse_reference(str(reference)) == reference


def test_a_default_in_the_document_is_no_secret_of_the_environment() -> None:
    assert is_reference("${oc.env:A,${oc.env:B,null}}")
    assert not is_reference("${oc.env:A,${oc.env:B,hunter2}}")


def test_a_reference_reads_what_is_set_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference("DSJOB_NOT_SET", True, Reference("DSJOB_OTHER"))
    assert (reference.find_missing(), reference.read()) == ("", "another-canary")
    assert (Reference("DSJOB_NOT_SET").find_missing(), Reference("DSJOB_NOT_SET", True).read()) == (
        "DSJOB_NOT_SET",
        None,
    )
    with pytest.raises(KeyError):
        Reference("DSJOB_NOT_SET").read()


# ---- masking


def test_a_value_that_was_read_is_masked_however_it_is_written() -> None:
    assert mask(CANARY) == CANARY
    Reference("DSJOB_CANARY").read()
    spelt = [CANARY, repr(CANARY), ascii(CANARY), json.dumps(CANARY), json.dumps(CANARY, ensure_ascii=False)]
    spelt += [quote(CANARY), quote(CANARY, safe=""), repr(CANARY.encode()), base64.b64encode(CANARY.encode()).decode()]
    for text in spelt:
        assert "hunter" not in mask(f"cannot open {text}")
        assert "aHVudGVy" not in mask(text)
        assert "***" in mask(text)


def test_a_value_is_masked_in_results_but_not_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_CANARY", "12345678")
    hide_values({"a": [{"b": HERE}]})
    assert mask_texts({"12345678": [0.12345678, "x12345678", None]}) == {"***": [0.12345678, "x***", None]}


@pytest.mark.parametrize("value", ["1", "train", "1000", "100.0", "."])
def test_a_short_value_spoils_no_message(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_CANARY", value)
    Reference("DSJOB_CANARY").read()
    assert mask("step 1000 of train.py took 100.0 s") == "step 1000 of train.py took 100.0 s"


def test_the_name_of_a_folder_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_CANARY", str(tmp_path))
    Reference("DSJOB_CANARY").read()
    assert mask(f"saved in {tmp_path}") == f"saved in {tmp_path}"


def test_each_line_of_a_key_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_CANARY", "-----BEGIN\nabcdefgh\n  ijklmnop\n")
    Reference("DSJOB_CANARY").read()
    assert mask("line 2: ijklmnop and abcdefgh") == "line 2: *** and ***"


def test_standard_output_and_error_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with watch_output():
        sys.stdout.write(f"before {CANARY}\n")  # nothing was read yet
        Reference("DSJOB_CANARY").read()
        sys.stdout.write(f"after {CANARY}\n")
        sys.stderr.writelines([f"{CANARY}\n", "end"])
        assert not sys.stdout.isatty()
    assert out.getvalue() == f"before {CANARY}\nafter ***\n"
    assert err.getvalue() == "***\nend"
    assert sys.stdout is out


def test_a_document_with_hidden_dollars_is_read_the_same_by_validate(capsys: pytest.CaptureFixture[str]) -> None:
    from dsjob.cli import main

    text = json.dumps(make_job(name="NAME")).replace("NAME", "\\u0024{oc.env:DSJOB_CANARY}")
    Path("job.json").write_text(text)
    assert main(["validate", "job.json"]) == 2
    told = "".join(capsys.readouterr())
    assert "error[environment]: name: environment variable DSJOB_CANARY is not allowed here" in told
    assert "hunter2" not in told


def test_a_variable_that_is_not_set_is_told_before_anything_starts(tmp_path: Path) -> None:
    from dsjob.front.execute import run_composed

    write_json(
        tmp_path / "job.json", make_job(model={"_target_": "torch.nn.Linear", "token": "${oc.env:DSJOB_NOT_SET}"})
    )
    composed = compose_file(tmp_path / "job.json")
    with pytest.raises(DocumentError, match=r"model\.token: environment variable DSJOB_NOT_SET is not set"):
        run_composed(composed, Trust(), False)
