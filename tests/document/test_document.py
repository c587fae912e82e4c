"""`dsjob.document`: values and places from JSON and YAML, and the complaints about what is neither."""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjob.contract.bounds import MAX_DEPTH
from dsjob.contract.paths import is_comment
from dsjob.document import Document, Mark, parse
from dsjob.document.positions import MAX_EXPANSION
from dsjob.errors import DocumentError, Problem

both_yaml_loaders = pytest.mark.parametrize("loader", ["C", "Python"])


def problems(text: str, source: str = "job.json", **kwargs: Any) -> tuple[Problem, ...]:
    with pytest.raises(DocumentError) as caught:
        parse(text, source, **kwargs)
    return caught.value.problems


def problem(text: str, source: str = "job.json", **kwargs: Any) -> Problem:
    (only,) = problems(text, source, **kwargs)
    assert only.source == source
    return only


def places(document: Document) -> dict[str, tuple[int, int, int, int]]:
    """Line and column of key and value by dotted path."""
    result = {}
    for path, value in document.values.items():
        key = document.keys.get(path, Mark(0, 0))
        result[".".join(map(str, path))] = (key.line, key.column, value.line, value.column)
    return result


def rest(document: Document, mark: Mark) -> str:
    """The text from a mark on."""
    lines = document.text.split("\n")[mark.line - 1 :]
    return "\n".join(lines)[mark.column - 1 :]


# ---- values and places

JSON_TEXT = """\
// a job
{
\t"trainer": {"micro_batch": 4, "lr": 5e-5,},   # after a tab
  "files": [ "a.txt",
             "é\\u00e9\\n\\ud83d\\ude00", {"x": -0.5}, [], ],  /* one
  comment */ "big": 5e8, "none": null, "yes": true, "no": false, "": {}
}
"""


def test_json_values_and_places() -> None:
    document = parse(JSON_TEXT, "job.json")
    assert document.source == "job.json"
    assert document.value == {
        "trainer": {"micro_batch": 4, "lr": 5e-5},
        "files": ["a.txt", "éé\n😀", {"x": -0.5}, []],
        "big": 5e8,
        "none": None,
        "yes": True,
        "no": False,
        "": {},
    }
    assert type(document.value["trainer"]["micro_batch"]) is int
    assert type(document.value["big"]) is float
    assert places(document) == {
        "": (6, 66, 6, 70),
        "trainer": (3, 2, 3, 13),
        "trainer.micro_batch": (3, 14, 3, 29),
        "trainer.lr": (3, 32, 3, 38),
        "files": (4, 3, 4, 12),
        "files.0": (4, 14, 4, 14),
        "files.1": (5, 14, 5, 14),
        "files.2": (5, 39, 5, 39),
        "files.2.x": (5, 40, 5, 45),
        "files.3": (5, 52, 5, 52),
        "big": (6, 14, 6, 21),
        "none": (6, 26, 6, 34),
        "yes": (6, 40, 6, 47),
        "no": (6, 53, 6, 59),
    }
    assert document.values[()] == Mark(2, 1)
    assert () not in document.keys
    assert len(document.keys) == len(document.values) - 1 == 14


YAML_TEXT = """\
# a job
trainer: &base
  micro_batch: 4
  "lr": 5e-5
files:
- a.txt
- 'é': {x: -0.5}   # after é
-   |
  two
  lines
empty:
again: *base
more:
  <<: *base
  lr: 1
"""


@both_yaml_loaders
def test_yaml_values_and_places(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loader == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader")
    document = parse(YAML_TEXT, "job.yaml")
    assert document.value == {
        "trainer": {"micro_batch": 4, "lr": 5e-5},
        "files": ["a.txt", {"é": {"x": -0.5}}, "two\nlines\n"],
        "empty": None,
        "again": {"micro_batch": 4, "lr": 5e-5},
        "more": {"micro_batch": 4, "lr": 1},
    }
    assert places(document) == {
        "": (0, 0, 2, 1),
        "trainer": (2, 1, 2, 10),
        "trainer.micro_batch": (3, 3, 3, 16),
        "trainer.lr": (4, 3, 4, 9),
        "files": (5, 1, 6, 1),
        "files.0": (6, 3, 6, 3),
        "files.1": (7, 3, 7, 3),
        "files.1.é": (7, 3, 7, 8),
        "files.1.é.x": (7, 9, 7, 12),
        "files.2": (8, 5, 8, 5),
        "empty": (11, 1, 11, 7),
        "again": (12, 1, 12, 8),
        "again.micro_batch": (3, 3, 3, 16),
        "again.lr": (4, 3, 4, 9),
        "more": (13, 1, 14, 3),
        "more.micro_batch": (3, 3, 3, 16),
        "more.lr": (15, 3, 15, 7),
    }


def test_same_content_in_json_and_yaml() -> None:
    as_json = parse('{"a": [1, 2.5, null, "on", "5"], "b": {"c": true, "d": "x: y"}, "1": 5e8}', "x.json")
    as_yaml = parse("a: [1, 2.5, ~, on, '5']\nb:\n  c: true\n  d: 'x: y'\n1: 5e8\n", "x.yaml")
    assert as_json.value == as_yaml.value
    assert set(as_json.keys) == set(as_yaml.keys)
    assert set(as_json.values) == set(as_yaml.values)


def test_mark_falls_back_to_the_nearest_ancestor() -> None:
    document = parse('{\n "a": {"b": [10,\n 20]}}', "x.json")
    assert document.mark(("a", "b", 1)) == Mark(3, 2)
    assert document.mark(["a", "b", 7, "deep"]) == Mark(2, 8)
    assert document.mark(("a", "zzz")) == Mark(2, 2)
    assert document.mark(("zzz",)) == document.mark(()) == Mark(1, 1)


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("source", ["x.json", "x.yaml"])
def test_byte_order_mark_and_newlines(source: str, start: str, newline: str) -> None:
    lines = ['{"a": 1,', ' "b": {', '  "c": 2 }}']
    document = parse(start + newline.join(lines), source)
    assert document.value == {"a": 1, "b": {"c": 2}}
    assert document.text == "\n".join(lines)
    assert document.keys["a",] == Mark(1, 2)
    assert document.keys["b", "c"] == Mark(3, 3)


@pytest.mark.parametrize(
    ("source", "text", "is_json"),
    [
        ("a.json", "a: 1", True),
        ("A.JSON", "a: 1", True),
        ("a.jsonc", "a: 1", True),
        ("a.yaml", "{a: 1}", False),
        ("dir.json/a.yml", "{a: 1}", False),
        ("runs#1/what?/a.yaml", "{a: 1}", False),
        ("s3://b/a.yaml?version=1#x.json", "{a: 1}", False),
        ("https://h/a.json?raw=a.yaml", "a: 1", True),
        ("<stdin>", "a: 1", False),
        ("<stdin>", "# c\n/* d */ // e\n  {a: 1}", True),
        ("<stdin>", "# {\n--- {a: 1}", False),
        ("ds_config", '\ufeff {"a": 1}', True),
    ],
)
def test_format_from_suffix_or_first_character(source: str, text: str, is_json: bool) -> None:
    """Each text is wrong in the one format and right in the other, or is quoted JSON."""
    if is_json and '"' not in text:
        assert problem(text, source).hint.startswith(("JSON looks like", "keys are written in double quotes"))
    else:
        assert parse(text, source).value == {"a": 1}


@pytest.mark.parametrize(("format_", "value"), [("json", 1), ("yaml", "0x")])
def test_format_given_beats_the_suffix(format_: Literal["json", "yaml"], value: object) -> None:
    text = '{"a": 1}' if format_ == "json" else "{a: 0x}"
    assert parse(text, "x.yaml" if format_ == "json" else "x.json", format=format_).value == {"a": value}


# ---- properties

keys = st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


def trees(key: st.SearchStrategy[str], scalar: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    inner = st.recursive(scalar, lambda v: st.lists(v, max_size=4) | st.dictionaries(key, v, max_size=4), max_leaves=20)
    return st.dictionaries(key, inner, max_size=5)


def noise(rng: random.Random) -> str:
    kinds = ["", "", "", " ", "\n", "\t", "\r\n", ' # x } ] "\n', "// y , : '\n", "/* z \n */"]
    return "".join(rng.choice(kinds) for _ in range(rng.randrange(3)))


def written(value: Any, rng: random.Random) -> str:
    """JSON with comments, odd spacing and trailing commas wherever they are allowed."""
    if isinstance(value, dict):
        pairs = [(json.dumps(k, ensure_ascii=rng.random() < 0.5), written(v, rng)) for k, v in value.items()]
        items, brackets = [f"{k}{noise(rng)}:{noise(rng)}{v}" for k, v in pairs], "{}"
    elif isinstance(value, list):
        items, brackets = [written(v, rng) for v in value], "[]"
    else:
        return json.dumps(value, ensure_ascii=rng.random() < 0.5)
    body = ",".join(noise(rng) + item + noise(rng) for item in items)
    return brackets[0] + body + ("," if items and rng.random() < 0.5 else "") + noise(rng) + brackets[1]


def at_path(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def all_paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path}.union(*(all_paths(child, (*path, part)) for part, child in children))


def require_places(document: Document) -> None:
    """Every key and value has a place, and there stands what it says."""
    assert set(document.values) == all_paths(document.value)
    assert set(document.keys) == all_paths(document.value) - {()}
    decoder = json.JSONDecoder()
    for path, mark in document.values.items():
        value, here = at_path(document.value, path), rest(document, mark)
        if isinstance(value, (dict, list)):
            assert here[0] == ("{" if isinstance(value, dict) else "[")
        else:
            found = decoder.raw_decode(here)[0]
            assert (type(found), found) == (type(value), value)
    for path, mark in document.keys.items():
        if isinstance(path[-1], str):
            assert decoder.raw_decode(rest(document, mark))[0] == path[-1]
        else:
            assert mark == document.values[path]


@given(trees(keys, scalars), st.integers(0, 9) | st.none() | st.just("\t"))
@settings(deadline=None)
def test_any_json_comes_back(value: dict[str, Any], indent: int | str | None) -> None:
    document = parse(json.dumps(value, indent=indent), "x.json")
    assert repr(document.value) == repr(value)  # repr: 1 is not True, 0.0 is not -0.0, and order counts
    require_places(document)


@given(trees(keys, scalars), st.integers(0, 2**32))
@settings(deadline=None)
def test_any_json_with_comments_comes_back(value: dict[str, Any], seed: int) -> None:
    document = parse(written(value, random.Random(seed)), "x.json")
    assert repr(document.value) == repr(value)
    require_places(document)


plain_text = st.text(string.ascii_letters + string.digits + " .:-_#{}[],&*!|>'\"\\%@`$<é😀", max_size=8)
plain_keys = plain_text.filter(lambda key: not is_comment(key))
plain_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain_text
)


@given(trees(plain_keys, plain_scalars), st.integers(0, 9) | st.none())
@settings(deadline=None)
def test_json_read_as_yaml_is_the_same_document(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    as_json, as_yaml = parse(text, "x", format="json"), parse(text, "x", format="yaml")
    assert repr(as_json.value) == repr(as_yaml.value) == repr(value)
    assert dict(as_json.keys) == dict(as_yaml.keys)
    assert dict(as_json.values) == dict(as_yaml.values)


@given(trees(plain_keys, plain_text), st.sampled_from([True, False]), st.integers(2, 6))
@settings(deadline=None)
def test_dumped_yaml_comes_back(value: dict[str, Any], flow: bool, indent: int) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, indent=indent, allow_unicode=True, default_style='"')
    document = parse(text, "x.yaml", format="yaml")
    assert document.value == value
    assert set(document.values) == all_paths(value)
    assert set(document.keys) == all_paths(value) - {()}
    for path, mark in document.keys.items():
        if isinstance(path[-1], str):
            assert rest(document, mark)[0] == '"'


@pytest.mark.parametrize("source", ["x.json", "x.yaml"])
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_damaged_text_is_read_or_refused_but_never_breaks(source: str, data: st.DataObject) -> None:
    text = JSON_TEXT if source == "x.json" else YAML_TEXT
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 3))
        text = (
            text[:at]
            + data.draw(st.sampled_from([*"{}[]:,'\"\\/*#&!|-? \t\n\x00\x85\ud800<1eN", ""]))
            + text[at + cut :]
        )
    try:
        document = parse(text, source)
    except DocumentError as error:
        for found in error.problems:
            assert found.message
            assert found.rule
            assert 1 <= found.line <= text.count("\n") + 1
            assert 1 <= found.column <= len(text) + 1
    else:
        assert set(document.values) == all_paths(document.value)


# ---- JSON that is not

BAD_JSON = [  # text, place, message, hint
    ('{"a": 1, "b" 2}', (1, 14), 'expected a colon after the key "b", found `2`', ""),
    ('{"a": 1\n "b": 2}', (1, 8), 'a comma is missing before `"b"`', "comma"),
    ('{"a": [1\n\n 2]}', (1, 9), "a comma is missing before `2`", "comma"),
    ("{'a': 1}", (1, 2), "expected a key, found `'a'`", "double quotes"),
    ("{\"a\": 'b'}", (1, 7), "expected a value, found `'b'`", "double quotes"),
    ('{"a": “b”}', (1, 7), "expected a value, found `“b”`", "double quotes"),
    ("{\n  lr: 1}", (2, 3), "expected a key, found `lr`", "double quotes"),
    ("{1: 1}", (1, 2), "expected a key, found `1`", "double quotes"),
    ('{"a": adam}', (1, 7), "expected a value, found `adam`", "double quotes"),
    ('{"a": True}', (1, 7), "found `True`", "true, false and null are lowercase"),
    ('{"a": [FALSE]}', (1, 8), "found `FALSE`", "true, false and null are lowercase"),
    ('{"a": None}', (1, 7), "found `None`", "JSON writes null"),
    ('{"a": NaN}', (1, 7), "found `NaN`", "JSON has no such number"),
    ('{"a": -Infinity}', (1, 7), "found `-Infinity`", "JSON has no such number"),
    *(
        (f'{{"a": {n}}}', (1, 7), f"found `{n}`", "numbers look like")
        for n in ("01", "+1", ".5", "1.", "1_0", "0x1", "1e", "-", "1-2")
    ),
    ('{"a": 1e999}', (1, 7), "1e999 is not a finite 64-bit float", "null"),
    ('{"a": "b\n}', (1, 7), "this string is not closed on its line", '"'),
    ('{"a": "b', (1, 7), "this string is not closed on its line", '"'),
    ('{"a": "b\\', (1, 7), "this string is not closed on its line", '"'),
    ('{"a": "b\tc"}', (1, 9), "a raw U+0009 inside a string", r"\t"),
    ('{"a": "C:\\data"}', (1, 10), r"\d is not an escape", r"\\"),
    ('{"a": "\\u12"}', (1, 8), r"\u is not an escape", r"\uXXXX"),
    ('{"a": "\\ud800"}', (1, 7), "half of a surrogate pair", "both halves"),
    ('{"a": 1 /* b }', (1, 9), "this comment is never closed", "*/"),
    ("/* {", (1, 1), "this comment is never closed", "*/"),
    ('{\n"a": {"b": 1', (2, 13), "found the end of the text", "the { of line 2 is still open: close it with }"),
    ('{"a": [1, {"b": 2], 3}', (1, 18), "found `]`", "the { of line 1 is still open: close it with }"),
    ('{"a": [1, }', (1, 11), "found `}`", "the [ of line 1 is still open: close it with ]"),
    ('{"a": }', (1, 7), "expected a value, found `}`", ""),
    ('{"a": 1,, "b": 2}', (1, 9), "expected a key, found `,`", ""),
    ("{,}", (1, 2), "expected a key, found `,`", ""),
    ('{"a": [,]}', (1, 8), "expected a value, found `,`", ""),
    ('{"a": 1}\n{"b": 2}', (2, 1), "expected the end of the text, found `{`", "one object"),
    ('{"a": 1}}', (1, 9), "expected the end of the text, found `}`", "one object"),
    ('{"a":\xa01}', (1, 6), r"found `\xa0`", ""),
]


@pytest.mark.parametrize(("text", "place", "message", "hint"), BAD_JSON, ids=lambda v: repr(v)[:30])
def test_json_mistakes_are_explained(text: str, place: tuple[int, int], message: str, hint: str) -> None:
    found = problem(text)
    assert (found.line, found.column) == place
    assert message in found.message
    assert hint in found.hint
    assert bool(hint) == bool(found.hint)
    assert found.rule == ("number" if "finite" in message else "syntax")


def test_every_prefix_of_a_document_is_refused_where_it_ends() -> None:
    text = '{"a": {"b": [1, "x"], "c": true}}'
    for length in range(1, len(text)):
        found = problem(text[:length])
        assert found.rule == "syntax"
        assert found.line == 1
        assert found.column <= length + 1


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [("", 1, "is empty"), (" // x", 6, "is empty"), ("[1]", 1, "starts with `[`"), (" 5", 2, "starts with `5`")],
)
def test_json_root_must_be_an_object(text: str, column: int, what: str) -> None:
    found = problem(text)
    assert (found.rule, found.line, found.column) == ("not-an-object", 1, column)
    assert found.message == f"a document must be one object, this one {what}"


# ---- YAML that is not, or not ours

BAD_YAML = [  # text, rule, place, message, hint
    ("", "not-an-object", (1, 1), "is empty", ""),
    ("# only a comment\n", "not-an-object", (1, 1), "is empty", ""),
    ("---\n", "not-an-object", (2, 1), "is empty", ""),
    ("\n- 1\n", "not-an-object", (2, 1), "is a list", ""),
    ("hello\n", "not-an-object", (1, 1), "is a scalar", ""),
    ("a: 1\n---\nb: 2\n", "syntax", (2, 1), "a second document", "---"),
    ("a: !foo 1\n", "tag", (1, 4), "the tag !foo is not allowed", "!!str"),
    ("a: !!python/name:os.system x\n", "tag", (1, 4), "!!python/name:os.system", "!!str"),
    ("a: !!timestamp 2020-01-01\n", "tag", (1, 4), "!!timestamp", "!!str"),
    ("a: !!set {x}\n", "tag", (1, 4), "!!set", "!!map"),
    ("a: !!str [x]\n", "tag", (1, 4), "!!str", "!!seq"),
    ("a: *x\nb: &x 1\n", "alias", (1, 4), "has no anchor above it", "&x"),
    ("a: &x\n  b: [*x]\n", "alias", (2, 7), "the alias *x is inside its own anchor", ""),
    ("a: &x\n  <<: *x\n", "alias", (2, 7), "the alias *x is inside its own anchor", ""),
    ("? [a]\n: 1\n", "key", (1, 3), "a key must be text", "quote"),
    ("a: {{ b }}\n", "key", (1, 5), "a key must be text", "quote"),
    ("b: &b {x: 1}\n*b : 1\n", "key", (1, 4), "a key must be text", "quote"),
    ("a: {? : 1}\n", "key", (1, 7), "no key before this colon", ""),
    ("a: 1\n<<: 5\n", "merge", (2, 5), "<< merges mappings", "<<: *name"),
    ("a: &a [1]\nb: {<<: [*a]}\n", "merge", (2, 10), "<< merges mappings", "<<: *name"),
    ("a: .inf\n", "number", (1, 4), ".inf is not a finite", "null"),
    ("a: [1, .NaN]\n", "number", (1, 8), ".NaN is not a finite", "null"),
    ("a: 1e999\n", "number", (1, 4), "1e999 is not a finite", "null"),
    ("a:\n\tb: 1\n", "syntax", (2, 1), "this is not YAML", "tab"),
    ("a: b: c\n", "syntax", (1, 5), "this is not YAML", "quote values"),
    ("a: @x\n", "syntax", (1, 4), "this is not YAML", "quotes"),
    ("a:\n  - 1\n - 2\n", "syntax", (3, 2), "starts on line 1", "indentation"),
    ("a: 'x\n\n", "syntax", (3, 1), "starts on line 1", "quote is not closed"),
    ("a: [1,\n  2\n", "syntax", (3, 1), "starts on line 1", ""),
    ("a: [${x}]\n", "syntax", (1, 6), "this is not YAML", "${...}"),
    ('a: "\\d"\n', "syntax", (1, 5), "this is not YAML", "single quotes"),
    ("a: 1\nb: \x07\n", "syntax", (2, 4), "U+0007", "remove"),
    ("é: \ud800\n", "syntax", (1, 4), "U+D800", "remove"),
]


@pytest.mark.parametrize(("text", "rule", "place", "message", "hint"), BAD_YAML, ids=lambda v: repr(v)[:30])
def test_yaml_mistakes_are_explained(text: str, rule: str, place: tuple[int, int], message: str, hint: str) -> None:
    found = problem(text, "job.yaml")
    assert (found.rule, found.line, found.column) == (rule, *place)
    assert message in found.message
    assert hint in found.hint


@both_yaml_loaders
def test_escape_that_overflows_is_a_document_error(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loader == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader")
    assert problem('a: "\\U99999999"', "x.yaml").rule == "syntax"


YAML_SCALARS = {
    "5e-5": 5e-5,
    "1e9": 1e9,
    "1E+3": 1e3,
    "1.": 1.0,
    ".5": 0.5,
    "-.5e1": -5.0,
    "+1.5": 1.5,
    "7": 7,
    "-0": 0,
    "+5": 5,
    "017": 17,
    "0o17": 15,
    "0x1F": 31,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
    "null": None,
    "Null": None,
    "NULL": None,
    "~": None,
    "": None,
}
YAML_STRINGS = (
    *("on", "off", "yes", "no", "Yes", "NO", "y", "n", "tRUE", "None", "12:30:45", "1:30", "2020-01-01", "1_000"),
    *("0b11", "0x", "0o8", "-0x1", "+-1", ".", ".e5", "e5", "1e", "1.2.3", "=", "nan", "inf", "Infinity", ".iNF"),
    *("${oc.env:HOME}", "${a}/b", "s3://b/x", "a#b", "<<", "١"),
)


@pytest.mark.parametrize(("text", "value"), YAML_SCALARS.items())
def test_yaml_plain_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse(f"a: {text}\nb: [{text or '~'}]", "x.yaml").value
    assert (type(found["a"]), found["a"]) == (type(value), value)
    assert (type(found["b"][0]), found["b"][0]) == (type(value), value)


@pytest.mark.parametrize("text", YAML_STRINGS)
def test_yaml_plain_scalars_that_stay_text(text: str) -> None:
    assert parse(f"a: {text}", "x.yaml").value == {"a": text}


@pytest.mark.parametrize("text", [*YAML_SCALARS, *YAML_STRINGS])
def test_yaml_quoted_and_tagged_scalars_are_text(text: str) -> None:
    for written_as in (f"'{text}'", f'"{text}"', f"!!str {text}", f"! {text}"):
        assert parse(f"a: {written_as}", "x.yaml").value == {"a": text}
    assert parse(f"a: |-\n  {text}\n", "x.yaml").value == {"a": text}


def test_yaml_plain_keys_become_their_text() -> None:
    assert list(parse("1: a\ntrue: b\n~: c\n1.50: d\n'': e\non: f", "x.yaml").value) == [
        "1",
        "true",
        "~",
        "1.50",
        "",
        "on",
    ]


def test_yaml_merge() -> None:
    text = """
base: &base {x: 1, y: 2}
other: &other {y: 20, z: 30}
one: {a: 0, <<: *base, y: 9}
two: {<<: [*base, *other], w: 4}
nested: &n {<<: *other, y: 21}
three: {<<: *n}
inline: {<<: {p: 1}, q: 2}
quoted: {'<<': 1}
"""
    value = parse(text, "x.yaml").value
    assert list(value["one"].items()) == [("x", 1), ("y", 9), ("a", 0)]
    assert list(value["two"].items()) == [("x", 1), ("y", 2), ("z", 30), ("w", 4)]
    assert value["three"] == {"y": 21, "z": 30}
    assert value["inline"] == {"p": 1, "q": 2}
    assert value["quoted"] == {"<<": 1}


def test_yaml_aliases_do_not_share_what_they_repeat() -> None:
    value = parse("a: &a {x: [1]}\nb: *a\nc: &a 5\nd: *a\n*a : e", "x.yaml").value
    assert value == {"a": {"x": [1]}, "b": {"x": [1]}, "c": 5, "d": 5, "5": "e"}
    value["a"]["x"].append(2)
    assert value["b"] == {"x": [1]}


# ---- duplicate keys


def test_all_duplicate_keys_are_named_with_both_lines() -> None:
    text = '{"a": 1,\n "b": {"c": 1,\n "c": 2},\n "a": 3, "a": 4,\n "e": [{"f": 1, "f": 1}]}'
    found = problems(text)
    assert [(p.path, p.line, p.column) for p in found] == [
        (("b", "c"), 3, 2),
        (("a",), 4, 2),
        (("a",), 4, 10),
        (("e", 0, "f"), 5, 17),
    ]
    assert {p.rule for p in found} == {"duplicate-key"}
    assert found[0].message == 'the key "c" is given twice: first on line 2, again on line 3'
    assert found[2].message == 'the key "a" is given twice: first on line 1, again on line 4'


def test_duplicate_keys_in_yaml() -> None:
    text = "a: &a\n  x: 1\n  'x': 2\nb: *a\nc: {<<: *a}\n1: 0\n'1': 0\nd: {<<: *a,\n  <<: *a}\n"
    assert [(p.path, p.line, p.column) for p in problems(text, "x.yaml")] == [
        (("a", "x"), 3, 3),  # once, however often it is repeated
        (("1",), 7, 1),
        (("d", "<<"), 9, 3),
    ]


def test_equal_keys_by_different_spelling_are_duplicates() -> None:
    assert problem('{"a\\u0062": 1, "ab": 2}').path == ("ab",)


# ---- limits


@pytest.mark.parametrize("source", ["x.json", "x.yaml"])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_depth(source: str, opening: str, closing: str) -> None:
    def nested(levels: int) -> str:
        return '{"r":' + opening * (levels - 1) + "1" + closing * (levels - 1) + "}"

    assert parse(nested(MAX_DEPTH), source).value
    found = problem(nested(MAX_DEPTH + 1), source)
    assert found.rule == "too-deep"
    assert found.column == 6 + len(opening) * (MAX_DEPTH - 1)
    assert problem(nested(200_000), source).rule == "too-deep"  # yaml.compose would end the process here


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{a: " * 200_000, "- " * 2000, "? " * 2000])
def test_depth_of_unclosed_yaml(text: str) -> None:
    assert problem(text, "x.yaml").rule == "too-deep"


def test_depth_by_aliases_and_merges() -> None:
    lists = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 300))
    merges = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 300))
    assert problem(lists, "x.yaml").rule == "too-deep"
    assert problem(merges, "x.yaml").rule == "too-deep"


@pytest.mark.parametrize(
    "line",
    ["a{0}: &a{0} [*a{1}, *a{1}, *a{1}]", "a{0}: &a{0} {{x: *a{1}, y: *a{1}}}", "a{0}: &a{0} {{<<: [*a{1}, *a{1}]}}"],
)
def test_alias_bombs_are_refused(line: str) -> None:
    text = "a0: &a0 {}\n" + "".join(line.format(i, i - 1) + "\n" for i in range(1, 90))
    found = problem(text, "x.yaml")
    assert found.rule == "alias"
    assert f"{MAX_EXPANSION:,}" in found.message
    assert found.line < 30


def test_long_text_repeated_by_aliases_counts() -> None:
    fits = "a: &a " + "x" * (MAX_EXPANSION // 2 - 1) + "\nb: [*a, *a]\n"
    assert len(parse(fits, "x.yaml").value["b"]) == 2
    assert problem(fits.replace("*a]", "*a, *a]"), "x.yaml").rule == "alias"


@pytest.mark.parametrize("source", ["x.json", "x.yaml"])
def test_numbers_too_long_to_be_meant(source: str) -> None:
    assert parse('{"a": ' + "9" * 250 + "}", source).value["a"] == int("9" * 250)
    for length in (251, 5000):
        assert problem('{"a": ' + "9" * length + "}", source).rule == "number"


BIG: dict[tuple[str, str], Callable[[int], str]] = {  # by format and name: a text that grows with a number
    ("json", "a real one"): lambda n: json.dumps(
        {f"k{i}": {"lr": i / 7, "s": "x" * 9, "l": [1, 2]} for i in range(n // 80)}, indent=1
    ),
    ("json", "one string"): lambda n: '{"a": "' + "x\\n" * n + '"}',
    ("json", "comments"): lambda n: "{" + "// x\n" * (n // 2) + "/*" + "*" * (n // 2) + "*/}",
    ("json", "an open comment"): lambda n: "{" + "/* " * n,
    ("json", "slashes"): lambda n: "{" + " /" * n,
    ("json", "a word"): lambda n: '{"a": ' + "x" * n,
    ("json", "digits"): lambda n: '{"a": ' + "1" * n,
    ("json", "quotes"): lambda n: "{" + "'" * n,
    ("json", "duplicates"): lambda n: "{" + '"a":1,' * (n // 20) + "}",
    ("yaml", "a real one"): lambda n: "".join(f"k{i}:\n  lr: {i / 7}\n  l: [1, b]\n" for i in range(n // 80)),
    ("yaml", "an open quote"): lambda n: "a: '" + "x\n\n" * n,
    ("yaml", "braces"): lambda n: "a: [" + "$ {" * n,
    ("yaml", "words"): lambda n: "a: " + "x " * n,
    ("yaml", "anchors"): lambda n: "".join(f"a{i}: &a{i} 1\n" for i in range(n // 40)),
    ("yaml", "a wide merge"): lambda n: "".join(f"a{i}: &a{i} {{k{i}: 1}}\n" for i in range(n // 200))
    + "z: {<<: [" + ",".join(f"*a{i}" for i in range(n // 200)) + "]}\n",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "name"), BIG)
@pytest.mark.full("json-a real one", "yaml-anchors", "yaml-a wide merge")
def test_time_is_linear(kind: str, name: str) -> None:
    """16 times the text takes some 16 times as long, where it would be 256 times if time grew with the square."""
    small, large = (read_or_refuse(BIG[kind, name](size), f"x.{kind}") for size in (30_000, 480_000))
    assert large < 64 * max(small, 0.001), (small, large)


def read_or_refuse(text: str, source: str) -> float:
    """Seconds of this process, whatever else the machine does; the least of three times."""
    seconds, longest = [], 0
    for _ in range(3):
        begin = time.process_time()
        try:
            parse(text, source)
        except DocumentError as error:
            longest = max(len(str(found)) for found in error.problems)
        seconds.append(time.process_time() - begin)
    assert longest < 400  # a message never carries the text away
    return min(seconds)


def test_json_needs_neither_yaml_nor_torch() -> None:
    code = (
        "import sys; from dsjob.document import parse; parse('{}', 'x.json');"
        "heavy = {'yaml', 'torch', 'hydra', 'omegaconf', 'jsonschema', 'fsspec', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
