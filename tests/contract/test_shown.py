"""Values from outside are short in messages, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest
from hostile_deepspeed import nest

from dsjob.contract import schema as contract
from dsjob.contract.bounds import check_values
from dsjob.contract.check import check_config, check_job, check_shape
from dsjob.contract.shown import cut, shorten
from dsjob.document import MAX_KEYS, parse, require_few
from dsjob.errors import MAX_MESSAGE, MAX_PROBLEMS, ConfigError, DocumentError, Problem


class Endless:
    def __repr__(self) -> str:
        raise AssertionError("nobody asks for this")


@pytest.mark.parametrize(
    ("value", "python", "as_json"),
    [
        ("a'b", '"a\'b"', '"a\'b"'),
        (None, "None", "null"),
        (True, "True", "true"),
        (-3, "-3", "-3"),
        (0.5, "0.5", "0.5"),
        ([1, "a"], "[1, 'a']", '[1, "a"]'),
        ((1,), "(1,)", "[1]"),
        ({"a": [True]}, "{'a': [True]}", '{"a": [true]}'),
        ([[[[1]]]], "[[[[...]]]]", "[[[[...]]]]"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]", "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        (b"ab", "b'ab'", "b'ab'"),
        (Endless(), "<Endless>", "<Endless>"),
        (1 << 5000, "an integer of 5001 bits", "an integer of 5001 bits"),
    ],
    ids=range(13),
)
def test_values_are_shown_as_they_are_written(value: Any, python: str, as_json: str) -> None:
    assert shorten(value) == python
    assert shorten(value, as_json=True) == as_json


@pytest.mark.parametrize(
    "value",
    [nest(40), {"a": nest(40)}, "x" * 10**7, {"x" * 10**7: 1}, b"x" * 10**7, [["x" * 10**6] * 9] * 9],
    ids=range(6),
)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_value_is_long(value: Any, as_json: bool) -> None:
    assert len(shorten(value, as_json=as_json)) <= 60
    assert len(shorten([value], 20, as_json=as_json)) <= 20


def test_texts_are_cut() -> None:
    assert cut("abcdefgh", 8) == "abcdefgh"
    assert cut("abcdefghi", 8) == "abcde..."


def test_a_problem_is_no_longer_than_helps() -> None:
    found = Problem("m" * 10**6, ("k" * 10**6, 1), hint="h" * 10**6)
    assert len(str(found)) < 3 * MAX_MESSAGE


def test_of_many_problems_the_first_are_told() -> None:
    error = DocumentError([Problem(f"{line:05}", line=line) for line in range(10_000, 0, -1)])
    assert len(error.problems) == MAX_PROBLEMS + 1
    assert error.problems[0].message == "00001"
    assert error.problems[-1].message == "and 9,800 more"


def test_documents_have_no_more_keys_than_are_compared_soon() -> None:
    text = "{" + ",".join(f'"k{number}": 1' for number in range(MAX_KEYS + 1)) + "}"
    with pytest.raises(DocumentError, match=r"x\.json:1:\d+: error\[too-large\]: more than 10,000 keys"):
        require_few(parse(text, "x.json"))
    with pytest.raises(DocumentError, match="more than 100,000 keys and"):
        require_few(parse('{"a": [' + "1," * 100_001 + "]}", "x.json"))
    assert require_few(parse('{"a": [' + "1," * 99_000 + "]}", "x.json"))


def test_of_many_keys_that_are_given_twice_the_first_are_told() -> None:
    with pytest.raises(DocumentError) as caught:
        parse("{" + '"a": 1,' * 50_000 + "}", "x.json")
    assert len(caught.value.problems) == MAX_PROBLEMS + 1


@pytest.mark.parametrize("value", [nest(40), nest(3, 100), {1: 2}, [10**5000]], ids=range(4))
def test_objects_are_held_to_what_documents_are(value: Any) -> None:
    (found,) = check_values({"a": value}, "config")
    assert found.source == "config"


def test_an_array_is_no_value_of_a_config() -> None:
    import torch

    (found,) = check_values({"optimizer": {"params": {"lr": torch.zeros(2)}}}, "config")
    assert (found.dotted, found.message) == ("optimizer.params.lr", "must be a JSON value, but is <Tensor>")
    assert check_values({"optimizer": {"params": {"lr": torch.tensor(0.1), "betas": (0.9, 0.99)}}}, "config") == []


def make_endless() -> list[Any]:
    """Two values of a few hundred bytes that stand for more than anybody can read: of lists, and of objects."""
    objects: Any = {"a": 1}
    for _ in range(30):
        objects = {"a": objects, "b": objects}
    return [nest(30), objects]


@pytest.mark.parametrize("endless", make_endless(), ids=["lists", "objects"])
def test_every_key_of_both_schemas_ends_soon_with_values_that_do_not(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jsonschema and rules would spell out, or walk through, all that is shared."""
    monkeypatch.setattr("dsjob.contract.bounds.MAX_VALUES", 1_000)
    for schema, check in ((contract.job_schema(), check_job), (contract.deepspeed_schema(), check_config)):
        for key in schema["properties"]:
            for value in (endless, {"type": "AdamW", "params": {"lr": endless}}):
                (found,) = check({key: value})
                assert found.rule in ("too-large", "too-deep")
                assert check_shape({key: value}, schema) == [found]


def test_classes_of_deepspeeds_names_take_no_endless_values() -> None:
    import torch
    from torch import nn, optim

    from dsjob.deepspeed.runtime.lr_schedules import WarmupLR
    from dsjob.deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for endless in make_endless():
        with pytest.raises(ConfigError, match="more than 100,000"):
            DeepSpeedZeroConfig(stage=endless)
        with pytest.raises(ConfigError, match="more than 100,000"):
            WarmupLR(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), warmup_max_lr=endless)
