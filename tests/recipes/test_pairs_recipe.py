"""Reading pairs: both formats, the split, and errors that say where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsjob.errors import DataError
from dsjob.recipes.pairs import read_pairs


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"source": "é", "target": "e", "more": 1}\n\n{"target": "2", "source": "two"}')
    assert read_pairs(path) == [("é", "e"), ("two", "2")]


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", '\ufeffid,de,en\r\n1,"ja, so","yes\nso"\r\n2,nein,no\r\n')
    assert read_pairs(path, source="de", target="en") == [("ja, so", "yes\nso"), ("nein", "no")]
    assert read_pairs(path, source="id", target="en", max_samples=1) == [("1", "yes\nso")]  # no trace of the BOM


def test_split_and_cap(tmp_path: Path) -> None:
    lines = [json.dumps({"source": str(i), "target": ""}) for i in range(1, 31)]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    train, validation = (read_pairs(path, split=split) for split in ("train", "validation"))
    assert [source for source, _ in validation] == ["10", "20", "30"]
    assert sorted(train + validation) == sorted(read_pairs(path))
    assert read_pairs(path, split="validation", max_samples=2) == validation[:2]


def test_reading_stops_at_the_cap(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"source": "a", "target": "b"}\nbroken')
    assert read_pairs(path, max_samples=1) == [("a", "b")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"source": "", "target": ""}\n{"source": 1,}\n', r"a\.jsonl:2: not JSON: .* at column"),
        ("a.jsonl", "\n[1]\n", r"a\.jsonl:2: found list, not an object"),
        ("a.jsonl", '{"source": 3, "target": ""}', r"a\.jsonl:1: 'source' is 3, not a text"),
        ("a.jsonl", '{"src": "", "target": ""}', r"a\.jsonl:1: there is no column 'source'\n.*src, target"),
        ("a.csv", "source,label\nx,y\n", r"a\.csv:2: there is no column 'target'\n.*source, label"),
        ("a.csv", "source,target\nx,y\nz\n", r"a\.csv:3: 'target' is None"),
        ("a.csv", 'source,target\nx,"y\n', r"a\.csv:2: not CSV"),
        ("a.csv", "source,target\n", "'all' of .*a.csv is empty"),
        ("a.jsonl", "", "'all' of .*a.jsonl is empty"),
        ("a.jsonl", b'{"source": "\xff"}', "a.jsonl is not UTF-8"),
        ("a.txt", "x", r"not a file of pairs\n.*\.jsonl, \.csv"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_pairs(write(tmp_path / name, content))


def test_missing_file_and_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*missing\.csv"):
        read_pairs(str(tmp_path / "missing.csv"))
    with pytest.raises(DataError, match="unknown split 'dev'"):
        read_pairs("a.csv", split="dev")
