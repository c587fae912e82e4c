"""A document may name texts, but no files of the kernel, no results of other targets, and no hub that may change."""

from __future__ import annotations

from typing import Any

import pytest
from small_jobs import make_document

from dsjob.trust.grant import Trust, check_document


def list_rules(**arguments: Any) -> list[str]:
    train = {"_target_": "dsjob.text.Text", **arguments}
    return [problem.rule for problem in check_document({"data": {"train": train}}, Trust())]


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        ({"source": "a.jsonl"}, []),
        ({"source": ["s3://bucket/a.jsonl"], "tokenizer": "bytes"}, []),
        ({"source": "/proc/self/environ"}, ["kernel-file"]),
        ({"source": ["a.txt", "/sys/../proc/self/environ"]}, ["kernel-file"]),
        ({"source": "/"}, ["kernel-file"]),
        ({"source": {"_target_": "datasets.load_dataset", "path": "json"}}, ["nested-target"]),
        ({"source": "a.jsonl", "_partial_": True}, ["bound-reader"]),
        ({"source": "a.jsonl", "tokenizer": "someone/words"}, ["unpinned"]),
        ({"source": "a.jsonl", "tokenizer": "someone/words", "revision": 40 * "a"}, []),
        ({"dataset": "someone/texts"}, ["unpinned"]),
        ({"dataset": "someone/texts", "revision": 40 * "a"}, ["unpinned"]),
        ({"dataset": "someone/texts", "dataset_revision": 40 * "a"}, []),
        ({"dataset": "a/b", "tokenizer": "c/d", "dataset_revision": 40 * "a"}, ["unpinned"]),
        ({"dataset": "a/b", "tokenizer": "c/d", "dataset_revision": 40 * "a", "revision": 40 * "b"}, []),
        ({"dataset": {"_target_": "datasets.load_dataset", "path": "json"}}, ["nested-target"]),
        ({"source": "sftp://host/a.jsonl"}, ["untrusted-protocol"]),
        ({"source": "a.jsonl", "cache_dir": "/etc/cron.d"}, ["outside-folder"]),
    ],
)
def test_what_texts_may_name(arguments: dict[str, Any], rules: list[str]) -> None:
    assert list_rules(**arguments) == rules


@pytest.mark.parametrize(
    ("named", "rules"),
    [
        ("someone/words", ["unpinned"]),
        ("bytes", []),
        (".", []),
        ({"_target_": "transformers.AutoTokenizer.from_pretrained", "_args_": ["a/b"], "revision": 40 * "a"}, []),
    ],
)
def test_the_tokenizer_of_generation_is_checked_with_its_place(named: Any, rules: list[str]) -> None:
    problems = check_document({"generation": {"tokenizer": named}}, Trust())
    assert [problem.rule for problem in problems] == rules
    assert all(problem.dotted == "generation.tokenizer" and "revision" in problem.hint for problem in problems)
    assert check_document({"generation": {"tokenizer": named}}, Trust(unpinned=True)) == []


def test_the_message_about_a_dataset_names_its_own_key() -> None:
    train = {"_target_": "dsjob.text.Text", "dataset": "someone/texts"}
    (problem,) = check_document({"data": {"train": train}}, Trust())
    assert problem.dotted == "data.train.dataset"
    assert problem.hint.startswith("add dataset_revision: <the 40 hex digits of a commit>")
    assert check_document({"data": {"train": train}}, Trust(unpinned=True)) == []


def test_the_rest_of_the_room_is_not_for_documents() -> None:
    document = make_document("runs/a", data={"train": {"_target_": "dsjob.text.cache.write_cache"}})
    assert "untrusted-target" in [problem.rule for problem in check_document(document, Trust())]
