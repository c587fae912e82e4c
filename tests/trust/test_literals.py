"""Listed constructors that read files or a hub take literals only: what a file holds becomes no path and no request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job

from dsjob.contract.spec import Target
from dsjob.errors import TargetError
from dsjob.trust import targets
from dsjob.trust.grant import Trust, check_document
from dsjob.trust.targets import build_callable, call_target

SECRET = {"_target_": "datasets.Dataset.from_text", "_args_": ["token.txt"]}
COLUMN = {
    "_target_": "torch.utils.data.ConcatDataset",
    "_args_": [{"_target_": "torch.utils.data.Subset", "_args_": [SECRET, ["text"]]}],
}
HEADERS = {"_target_": "torch.utils.data.StackDataset", "_args_": [["X"], COLUMN]}
LOAD: dict[str, Any] = {"_target_": "datasets.load_dataset", "path": "text"}
MODEL = "transformers.AutoModel.from_pretrained"
PINNED = {"pretrained_model_name_or_path": "./m"}


def rules(value: dict[str, Any], *granted: str) -> list[tuple[str, str]]:
    return [(problem.rule, problem.dotted) for problem in check_document(value, Trust(prefixes=granted))]


@pytest.fixture
def nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("was called")

    monkeypatch.setattr(targets, "refuse_exits", fail)


@pytest.mark.usefixtures("nothing_is_called")
@pytest.mark.parametrize(
    ("value", "rule", "place"),
    [
        ({**LOAD, "data_files": COLUMN}, "nested-target", "data_files"),
        ({**LOAD, "data_files": {"train": [COLUMN]}}, "nested-target", "data_files.train[0]"),
        ({**LOAD, "features": {"a": {"_target_": "torch.nn.Linear", "_args_": [1, 1]}}}, "nested-target", "features.a"),
        ({"_target_": "datasets.Dataset.from_text", "_args_": [COLUMN]}, "nested-target", "_args_[0]"),
        ({"_target_": MODEL, **PINNED, "config": COLUMN}, "nested-target", "config"),
        ({"_target_": MODEL, **PINNED, "x": {"_target_": "transformers.GPT2Config"}}, "nested-target", "x"),
        ({"_target_": "transformers.GPT2Config", "name_or_path": COLUMN}, "nested-target", "name_or_path"),
        ({"_target_": "datasets.Dataset.from_text", "_partial_": True}, "bound-reader", "_partial_"),
        ({**LOAD, "storage_options": {"headers": {"a": "b"}}}, "request-option", "storage_options"),
        ({**LOAD, "x": [{"cookies": {"a": "b"}}]}, "request-option", "x[0].cookies"),
        ({"_target_": MODEL, **PINNED, "proxies": {"https": "http://h"}}, "request-option", "proxies"),
        ({**LOAD, "data_files": "/proc/self/environ"}, "kernel-file", "data_files"),
        ({**LOAD, "data_files": {"train": ["file:///proc/self/environ"]}}, "kernel-file", "data_files.train[0]"),
        ({**LOAD, "data_files": "/p*c/self/environ"}, "kernel-file", "data_files"),
        ({**LOAD, "data_files": "/tmp/../*/self/environ"}, "kernel-file", "data_files"),
        ({**LOAD, "data_dir": "/tmp", "data_files": "../proc/self/environ"}, "kernel-file", "data_files"),
        ({**LOAD, "data_dir": "/"}, "kernel-file", "data_dir"),
        ({**LOAD, "data_files": "./link/self/environ"}, "kernel-file", "data_files"),
        ({"_target_": "dsjob.recipes.text.Files", "path": "/dev/stdin"}, "kernel-file", "path"),
    ],
)
def test_what_a_reader_may_not_be_given(
    value: dict[str, Any], rule: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("/proc", "link")
    document = make_job()
    document["data"]["train"] = value
    assert (rule, f"data.train.{place}") in rules(document)
    arguments = {key: item for key, item in value.items() if key != "_target_"}
    with pytest.raises(TargetError, match=r"literal arguments|may not be bound|where requests go|/proc|cannot import"):
        call_target(Target(value["_target_"], arguments))


def test_a_stolen_header_is_refused_at_its_place() -> None:
    value = {**LOAD, "data_files": "http://127.0.0.1:9/x.txt", "storage_options": {"headers": HEADERS}}
    (nested, option) = check_document(value, Trust())
    assert (nested.rule, nested.dotted) == ("nested-target", "storage_options.headers")
    assert "--trust datasets.load_dataset" in nested.hint
    assert (option.rule, option.dotted) == ("request-option", "storage_options")
    assert rules(value, "datasets.load_dataset") == []


def test_the_loop_passes_nothing_to_a_reader() -> None:
    with pytest.raises(TargetError, match="may not be bound"):
        build_callable(Target("datasets.Dataset.from_text", {}), "data.collate")
    with pytest.raises(TargetError, match="takes literals only"):
        call_target(Target("datasets.Dataset.from_text", {}), ["a.txt"])


@pytest.mark.parametrize(
    "value",
    [
        {**LOAD, "data_files": {"train": ["a.txt", "b/*.txt", "../c/*.txt", "/dev/shm/x.txt"]}, "split": "train"},
        {"_target_": "datasets.Dataset.from_csv", "_args_": ["a.csv"], "sep": "/"},
        {"_target_": "datasets.Dataset.from_dict", "mapping": {"headers": ["/proc/self/environ"]}},
        {"_target_": MODEL, **PINNED, "config": {"_target_": "transformers.GPT2Config", "n_layer": 1}},
        {
            "_target_": "transformers.AutoModelForCausalLM.from_config",
            "_args_": [{"_target_": "transformers.GPT2Config"}],
        },
        {"_target_": "transformers.GPT2LMHeadModel", "config": {"_target_": "transformers.GPT2Config"}},
        {
            "_target_": "transformers.DataCollatorWithPadding",
            "tokenizer": {"_target_": "transformers.AutoTokenizer.from_pretrained", **PINNED},
        },
    ],
)
def test_documents_as_they_are_meant_pass(value: dict[str, Any]) -> None:
    assert rules(value) == []
