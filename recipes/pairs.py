"""Reading a user's source and target texts from a JSONL or CSV file, with errors that name the line.

Handles the two formats only. `recipes/t5.py` makes tokens and batches of the texts.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TextIO

from dsjob import storage
from dsjob.errors import DataError
from dsjob.recipes.text import VALIDATION_SHARE, check_split

Pair = tuple[str, str]


def read_pairs(
    path: str, *, split: str = "all", source: str = "source", target: str = "target", max_samples: int | None = None
) -> list[Pair]:
    """The (source, target) texts of a UTF-8 file, in file order. Reading stops after `max_samples` of the split.

    `.jsonl` holds one JSON object a line, blank lines aside; `.csv` has a header. `source` and `target` name the keys
    or columns to take. Every tenth pair is validation, the others are train, "all" is the whole file.

    Raises:
        DataError: a missing file, an unknown ending, an invalid line (`file:line`), a missing column, or no pairs.
    """
    check_split(split)
    file = Path(path)
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv}
    if file.suffix not in readers:
        raise DataError(f"{path} is not a file of pairs", hint=f"allowed: {', '.join(readers)}")
    if not file.is_file():
        raise DataError(f"there is no file {path}")
    try:
        with storage.open_read(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as lines:
            pairs = enumerate(readers[file.suffix](lines, path, (source, target)), start=1)
            kept = (pair for number, pair in pairs if split in ("all", _split_of(number)))
            taken = list(islice(kept, max_samples))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason}") from error
    if not taken:
        raise DataError(
            f"split {split!r} of {path} is empty: every tenth pair is validation, the others are train",
            hint="for a small file: data.train.split=all, and for data.eval a file of its own with split=all, or none",
        )
    return taken


def _split_of(number: int) -> str:
    return "train" if number % VALIDATION_SHARE else "validation"


def _read_jsonl(lines: TextIO, path: str, columns: Pair) -> Iterator[Pair]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: found {type(row).__name__}, not an object")
        yield _take(row, columns, f"{path}:{number}")


def _read_csv(lines: TextIO, path: str, columns: Pair) -> Iterator[Pair]:
    rows = csv.DictReader(lines, strict=True)
    try:
        for row in rows:
            yield _take(row, columns, f"{path}:{rows.line_num}")
    except csv.Error as error:
        raise DataError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def _take(row: Mapping[str, object], columns: Pair, place: str) -> Pair:
    texts = []
    for column in columns:
        if column not in row:
            raise DataError(f"{place}: there is no column {column!r}", hint=f"available: {', '.join(map(str, row))}")
        text = row[column]
        if not isinstance(text, str):
            raise DataError(f"{place}: {column!r} is {text!r}, not a text")
        texts.append(text)
    return texts[0], texts[1]
