"""A local folder of data meets the policy of a document's arguments before `datasets` reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsjob.contract.access import Access
from dsjob.contract.spec import Target
from dsjob.errors import TargetError
from dsjob.trust.data_folders import check_data
from dsjob.trust.targets import call_target

LOAD = "datasets.load_dataset"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a folder of data `d` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "a.txt").write_text("one\ntwo\n")
    return tmp_path


def find(arguments: dict[str, Any], target: str = LOAD, protocols: frozenset[str] = frozenset()) -> list[str]:
    return [problem.rule for problem in check_data({"_target_": target, **arguments}, Access(protocols=protocols))]


def write_card(files: str) -> None:
    Path("d/README.md").write_text(
        f"---\nlicense: mit\nconfigs:\n- config_name: a\n  data_files: {files}\n---\n# Data\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "d"},
        {"_args_": ["./d"]},
        {"path": "text", "data_dir": "d"},
        {"path": "text", "data_files": "d/*.txt"},
        {"path": "text", "data_files": {"train": ["d/*.txt"]}},
        {"path": "text", "data_files": "**/*.txt"},
        {"path": "text", "data_files": "{d,e}/b.txt"},
    ],
)
def test_a_link_to_the_kernels_files_is_not_followed(arguments: dict[str, Any]) -> None:
    assert find(arguments) == []
    os.symlink("/proc/self/environ", "d/b.txt")
    assert "kernel-file" in find(arguments)


def test_a_link_behind_a_linked_folder_is_found(folder: Path) -> None:
    (folder / "other").mkdir()
    os.symlink("/proc/self/environ", "other/b.txt")
    os.symlink("../../other", "d/inner/way")
    os.symlink("..", "d/inner/round")  # which goes in circles
    assert find({"path": "d"}) == ["kernel-file"]


def test_a_link_to_a_folder_of_the_kernel_is_not_entered() -> None:
    os.symlink("/proc/self", "d/inner/way")
    assert find({"path": "d"}) == ["kernel-file"]


def test_a_pipe_is_not_waited_for() -> None:
    os.mkfifo("d/b.txt")
    assert find({"path": "d"}) == ["kernel-file"]
    assert find({"dataset_path": "d"}, "datasets.load_from_disk") == ["kernel-file"]


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ('"simplecache::http://127.0.0.1:9/x.json"', "chained-url"),
        ('"reference\\x3a\\x3adata:application/json;base64,e30="', "chained-url"),
        ("[{split: train, path: 'sftp://host/x.json'}]", "untrusted-protocol"),
        ('"/proc/self/environ"', "kernel-file"),
        ('"../../../../../../../../proc/self/environ"', "kernel-file"),
        ("&a [*a]", "data-card"),
    ],
)
def test_what_a_document_may_not_name_a_card_may_not(files: str, rule: str) -> None:
    write_card("a.txt")
    assert find({"path": "d"}) == []
    write_card(files)
    assert find({"path": "d"}) == [rule]


def test_a_granted_protocol_is_granted_to_cards() -> None:
    write_card("'sftp://host/x.json'")
    assert find({"path": "d"}, protocols=frozenset({"sftp"})) == []


def test_nothing_of_such_a_folder_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_TOKEN", "hf_never_to_be_stored")
    target = Target(LOAD, {"path": "./d", "cache_dir": "./cache", "split": "train"})
    assert call_target(target)[0] == {"text": "one"}
    os.symlink("/proc/self/environ", "d/b.txt")
    with pytest.raises(TargetError, match=r"d/b\.txt.*may name files in /proc"):
        call_target(target)
    assert not [file for file in Path("cache").rglob("*") if file.is_file() and b"never_to_be" in file.read_bytes()]
