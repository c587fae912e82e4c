"""Interpolations end: what they expand to, how deep they go and how much of them is read has a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_documents import compose_file, make_job, write_json

from dsjob.document import interpolation
from dsjob.document.interpolation import MAX_NESTED
from dsjob.document.positions import MAX_EXPANSION
from dsjob.errors import DocumentError, Problem


def double(levels: int, make: Any) -> dict[str, Any]:
    """`a0`, and names that each refer to the one before several times."""
    return {"a0": "x", **{f"a{level}": make(f"${{model.a{level - 1}}}") for level in range(1, levels + 1)}}


ENDLESS: dict[str, dict[str, Any]] = {
    "texts": double(11, lambda below: below * 10),
    "mappings": double(30, lambda below: {"x": below, "y": below}),
    "lists": double(30, lambda below: [below, below]),
    "lists in lists": double(30, lambda below: [[below], {"a": [below]}]),
    "created": double(30, lambda below: f"${{oc.create:[{below},{below}]}}"),
    "selected": double(30, lambda below: "${oc.select:" + below[2:-1] + "} ${oc.select:" + below[2:-1] + "}"),
    "values": double(30, lambda below: {"x": below, "y": below, "z": f"${{oc.dict.values:{below[2:-1]}}}"}),
    "decoded": double(11, lambda below: f"${{oc.decode:'\"{below}{below}{below}\"'}}"),
    "large": {"a0": "x" * 100_000, "a1": ["${model.a0}"] * 1000},
    "many": {"a0": "x", "a1": ["${model.a0}"] * 8000},
    "a large mapping": {"a0": {f"k{number}": number for number in range(5000)}, "a1": ["${model.a0}"] * 1000},
    "a mapping as text": {"a0": {f"k{number}": number for number in range(5000)}, "a1": "x ${model.a0}" * 1000},
    "a circle": {"a0": {"x": "${model.a1}"}, "a1": {"y": "${model.a0}"}},
    "a wide circle": {"a0": ["${model.a1}"] * 2, "a1": ["${model.a0}"] * 2},
}


def refuse(path: Path, document: dict[str, Any]) -> Problem:
    write_json(path / "job.json", document)
    with pytest.raises(DocumentError) as caught:
        compose_file(path / "job.json")
    (found,) = caught.value.problems
    assert (found.source, found.line > 0) == (str(path / "job.json"), True)
    return found


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.full("mappings", "lists in lists", "decoded", "many", "a large mapping", "a mapping as text")
def test_what_grows_without_end_is_refused_on_the_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = 0
    spend = interpolation._Resolution._spend

    def count(self: Any, value: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        return spend(self, value)

    monkeypatch.setattr(interpolation._Resolution, "_spend", count)
    found = refuse(tmp_path, make_job(model={"_target_": "a.b", **ENDLESS[name]}))
    assert found.rule in ("interpolation", "too-deep")
    assert found.path[0] == "model"
    assert 0 < evaluations <= MAX_EXPANSION // interpolation._EVALUATION + 1


def wrap(opening: str, closing: str, times: int) -> str:
    return opening * times + "1" + closing * times


@pytest.mark.parametrize(
    "text",
    [
        wrap("${oc.decode:", "}", 3000),
        wrap("${oc.decode:'", "'}", 3000),
        "${oc.create:" + wrap("[", "]", 3000) + "}",
        "${oc.create:" + wrap("{a: ", "}", 3000) + "}",
        wrap("${model[", "]}", 3000),
        "${" * 30_000,
        wrap("${oc.decode:", "}", MAX_NESTED + 1),
    ],
)
def test_texts_are_not_nested_without_end(text: str, tmp_path: Path) -> None:
    assert refuse(tmp_path, make_job(name=text)).rule == "too-deep"


def test_texts_have_no_more_characters_than_are_read_soon(tmp_path: Path) -> None:
    found = refuse(tmp_path, make_job(name="${model._target_}" + "x" * 1_000_000))
    assert (found.rule, found.dotted) == ("interpolation", "name")


def test_text_is_no_document_for_a_resolver(tmp_path: Path) -> None:
    """OmegaConf would read it as YAML, with aliases."""
    bomb = "a: &a [1]\\nb: &b [*a, *a]\\nc: [*b, *b]"
    assert "oc.create takes a mapping" in refuse(tmp_path, make_job(name=f'${{oc.create:"{bomb}"}}')).message
    deep = {"_target_": "a.b", "t": "[" * 200, "u": "${oc.decode:${model.t}}"}
    assert refuse(tmp_path, make_job(model=deep)).rule == "too-deep"


def test_keys_that_are_no_text_are_refused(tmp_path: Path) -> None:
    found = refuse(tmp_path, make_job(model={"_target_": "a.b", "x": "${oc.decode:'{1: a}'}"}))
    assert (found.rule, found.dotted) == ("key", "model.x")


def test_what_a_job_needs_is_resolved(tmp_path: Path) -> None:
    texts = {f"t{number}": "${trainer.max_steps}" for number in range(300)}
    nested = "${oc.decode:'[${oc.select:model.size,1}, {a: ${trainer.max_steps}}]'}"
    model = {"_target_": "a.b", "size": 7, "nested": nested, "same": "${.size}", "own": "${model.deep}", **texts}
    write_json(tmp_path / "job.json", make_job(model={**model, "deep": {"x": ["${model.size}"]}, "dots": "\\${a}"}))
    made = compose_file(tmp_path / "job.json").document["model"]
    assert made["nested"] == [7, {"a": 10}]
    assert (made["same"], made["own"], made["t299"], made["dots"]) == (7, {"x": [7]}, 10, "${a}")
